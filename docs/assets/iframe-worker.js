/* Search runs in a worker, and browsers start none for pages that are read from a disk. There, a
hidden frame takes its place: the same script, in a window of its own. */

"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open();
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((done) => frame.addEventListener("load", done));
      page.write(`<script src="${new URL(url, document.baseURI)}"></script>`);
      page.close();
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
