/* What all calculators share: elements of a page, fields for numbers, links that hold a state. */

"use strict";

const calculators = (() => {
  // ---------------------------------------------------------------------------------- elements

  /* An element with attributes, listeners (`oninput`, ...) and children. */
  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat(2).filter((child) => child !== undefined));
    return element;
  }

  function svg(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const field = (label, control) => h("label", {}, h("span", {}, label), control);

  const choice = (options, value, oninput) =>
    h(
      "select",
      { oninput },
      options.map((o) => h("option", { value: o, selected: o === value }, o)),
    );

  /* A field that cannot be read. */
  class Unreadable extends Error {}

  /* The double of a text: 0.1, 2^-9, 1/3, inf, nan, or a pattern of 16 bits as 0x3f80. A value
  beyond the doubles stays apart from 0 and infinity. */
  function read(text, format) {
    const words = text.trim().toLowerCase().replace("−", "-").replace("∞", "inf");
    if (/^0x[0-9a-f]{1,4}$/.test(words) && format.width === 16)
      return floats.fromBits(parseInt(words, 16), format);
    const plain = (word) => {
      const [, sign, rest] = /^([+-]?)(.*)$/.exec(word);
      let value = { inf: Infinity, infinity: Infinity, nan: NaN }[rest];
      if (value === undefined) {
        if (rest === "" || Number.isNaN(Number(rest))) return undefined;
        value = Math.min(Number(rest), Number.MAX_VALUE);
        if (value === 0 && /[1-9]/.test(rest.split("e")[0])) value = Number.MIN_VALUE;
      }
      return sign === "-" ? -value : value;
    };
    for (const [operator, apply] of [
      ["/", (a, b) => a / b],
      ["^", (a, b) => Math.sign(a) * Math.abs(a) ** b],
    ]) {
      const parts = words.split(operator).map(plain);
      if (words.includes(operator))
        return parts.length === 2 && !parts.includes(undefined) ? apply(...parts) : undefined;
    }
    return plain(words);
  }

  /* A field for a number of a format. It says where rounding leaves the range of the format. */
  function numeral(name, text, changed) {
    const input = h("input", {
      value: text,
      size: 9,
      spellcheck: "false",
      autocomplete: "off",
      oninput: changed,
    });
    const hint = h("small", { class: "hint", role: "status" });
    return {
      element: h("label", {}, h("span", {}, name), input, hint),
      input,
      set: (value) => {
        input.value = value;
      },
      /* As written. */
      exact(format) {
        const found = read(input.value, format);
        input.toggleAttribute("aria-invalid", found === undefined);
        hint.textContent = found === undefined ? "not a number" : "";
        if (found === undefined)
          throw new Unreadable(
            `“${input.value}” is not a number. Write 0.1, 1e-4, 2^-9, 1/3, inf, nan or 0x3f80.`,
          );
        return found;
      },
      /* Rounded to the format. */
      value(format) {
        const found = this.exact(format);
        const rounded = floats.round(found, format);
        if (rounded === 0 && found !== 0) hint.textContent = `too small for ${format.name}`;
        if (Number.isFinite(found) && Math.abs(rounded) === Infinity)
          hint.textContent = `too large for ${format.name}`;
        return rounded;
      },
    };
  }

  const show = (x) =>
    Object.is(x, -0)
      ? "−0"
      : Number.isNaN(x)
        ? "NaN"
        : String(x).replace("-", "−").replace("Infinity", "∞").replace("e−", "e-");

  /* A number with three digits, for a sentence. */
  const brief = (x) => show(Number(x.toPrecision(3)));

  const superscript = (n) => String(n).replace(/[-\d]/g, (c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] || "⁻");

  const code = (text) => h("code", {}, text);

  const verdict = (good, text) =>
    h("p", { class: `verdict ${good ? "good" : "bad"}`, role: "status" }, text);

  /* A calculator: controls above, and what `draw` makes of them below, anew with every change.
  `state` has the elements whose values a link to the calculator holds, by name. */
  function calculator(root, title, state, controls, draw) {
    const result = h("div", { class: "result" });
    const address = () => {
      const values = Object.entries(state).map(([name, element]) => [name, element.value]);
      return `#${new URLSearchParams([["play", root.dataset.play], ...values])}`;
    };
    const link = h("button", { type: "button", class: "link" }, "copy link");
    root.replaceChildren(
      h("p", { class: "title" }, title, link),
      h("div", { class: "controls" }, controls),
      result,
    );
    const update = () => {
      try {
        result.replaceChildren(...draw().filter((x) => x !== undefined));
      } catch (error) {
        if (!(error instanceof Unreadable)) throw error;
        result.replaceChildren(verdict(false, error.message));
      }
    };
    // At the end of a change: browsers limit how often an address may be replaced.
    const settle = () => history.replaceState(null, "", address());
    root.addEventListener("change", settle);
    root.addEventListener("click", (event) => {
      if (event.target.closest("button")) settle();
      if (event.target === link) copy(location.href, link);
    });
    const restore = () => {
      const found = new URLSearchParams(location.hash.slice(1));
      if (found.get("play") !== root.dataset.play) return;
      for (const [name, element] of Object.entries(state)) {
        const before = element.value;
        element.value = found.get(name) ?? before;
        if (element.value === "") element.value = before; // a choice that there is not
      }
      update();
      root.scrollIntoView({ block: "center" });
    };
    addEventListener("hashchange", restore);
    setTimeout(restore); // when the whole of the calculator stands
    return update;
  }

  function copy(text, button) {
    const before = button.textContent;
    const say = (words) => {
      button.textContent = words;
      setTimeout(() => (button.textContent = before), 2000);
    };
    const failed = () => say("the link is in the address bar");
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => say("copied"), failed);
    else failed();
  }

  /* Buttons that fill in numbers. */
  const examples = (entries, fill) =>
    h(
      "div",
      { class: "examples" },
      h("span", {}, "Try"),
      Object.entries(entries).map(([name, values]) =>
        h("button", { type: "button", onclick: () => fill(values) }, name),
      ),
    );

  /* Some `count` round numbers from low to high: 1, 2 or 5 times powers of ten, apart. */
  function ticks(low, high, count) {
    const power = 10 ** Math.floor(Math.log10((high - low) / count));
    const steps = [1, 2, 5, 10].map((n) => n * power);
    const chosen = steps.findIndex((step) => step * count >= high - low);
    const multiples = (step) => {
      const found = [];
      for (let i = Math.ceil(low / step); i * step <= high; i++)
        found.push(Number((i * step).toPrecision(15)));
      return found;
    };
    const found = multiples(steps[chosen]);
    return found.length < 2 && chosen > 0 ? multiples(steps[chosen - 1]) : found;
  }

  /* Draw anew when the place gets another width. */
  function followWidth(root, update) {
    let width = root.clientWidth;
    new ResizeObserver(() => {
      if (root.clientWidth === width) return;
      width = root.clientWidth;
      update();
    }).observe(root);
  }

  /* Make calculators of the places that wait for them: `<div class="play" data-play="name">`. */
  function start(plays) {
    for (const [name, play] of Object.entries(plays))
      for (const root of document.querySelectorAll(`.play[data-play="${name}"]`)) play(root);
  }

  return {
    h,
    svg,
    field,
    choice,
    read,
    numeral,
    show,
    brief,
    superscript,
    code,
    verdict,
    calculator,
    examples,
    ticks,
    followWidth,
    start,
  };
})();
