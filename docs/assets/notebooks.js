/* Save the notebook that a lesson holds. As a link to a file, a page from a disk would show it. */

"use strict";

(() => {
  const data = document.getElementById("notebook");
  const link = document.querySelector("a.notebook");
  if (!data || !link) return;
  const blob = new Blob([data.textContent], { type: "application/x-ipynb+json" });
  link.href = URL.createObjectURL(blob);
})();
