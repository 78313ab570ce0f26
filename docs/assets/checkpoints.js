/* Which weights moved between two checkpoints: safetensors files, read in the browser.

The counts are those of `mcf.meters.audit`. */

"use strict";

const checkpoints = (() => {
  const CHUNK = 1 << 20; // elements that are compared at a time
  const CELLS = 48; // of the strip that shows where a tensor moved

  const wide = (Type) => ({
    Type,
    same: (a, b) => a === b || (a !== a && b !== b),
    zero: (a) => a === 0,
    one: (a) => a === 1,
  });
  const patterns = (Type, magnitude, infinite, one) => {
    const isNaN = (a) => (a & magnitude) > infinite;
    return {
      Type,
      same: (a, b) => a === b || ((a | b) & magnitude) === 0 || (isNaN(a) && isNaN(b)),
      zero: (a) => (a & magnitude) === 0,
      one: (a) => a === one,
    };
  };
  const FLOATS = {
    F64: wide(Float64Array),
    F32: wide(Float32Array),
    F16: patterns(Uint16Array, 0x7fff, 0x7c00, 0x3c00),
    BF16: patterns(Uint16Array, 0x7fff, 0x7f80, 0x3f80),
    F8_E5M2: patterns(Uint8Array, 0x7f, 0x7c, 0x3c),
    F8_E4M3: patterns(Uint8Array, 0x7f, 0x7e, 0x38),
  };
  const INTEGERS = { I8: wide(Int8Array), I16: wide(Int16Array) };
  const NAMES = {
    F64: "fp64",
    F32: "fp32",
    F16: "fp16",
    BF16: "bf16",
    F8_E5M2: "fp8_e5m2",
    F8_E4M3: "fp8_e4m3fn",
  };
  const LEFT_OUT = /^(BOOL|[IU]\d+)$/;
  const PART = /^(.*)\.([a-z0-9_]+)\.(\w+)$/;

  /* The tensors of safetensors files, by name: where each lies, and its parts if it is an
  expansion. */
  async function open(files) {
    const found = new Map();
    for (const file of files) {
      const start = new DataView(await file.slice(0, 8).arrayBuffer());
      const length = start.byteLength === 8 ? Number(start.getBigUint64(0, true)) : 0;
      let header;
      try {
        if (!length || length > Math.min(file.size - 8, 100e6)) throw new Error("no header");
        header = JSON.parse(await file.slice(8, 8 + length).text());
      } catch {
        throw new Error(`${file.name || "a file"} is not a safetensors file.`);
      }
      const own = "mcftensor" in (header.__metadata__ ?? {});
      delete header.__metadata__;
      for (const [name, entry] of Object.entries(header)) {
        const [begin, end] = entry.data_offsets.map((at) => at + 8 + length);
        if (end > file.size) throw new Error(`${file.name || "a file"} ends within ${name}.`);
        if (found.has(name)) throw new Error(`${name} is in two of the files.`);
        found.set(name, { name, dtype: entry.dtype, shape: entry.shape, file, begin, own, parts: [] });
      }
    }
    for (const entry of [...found.values()]) {
      const [, name, format, what] = (entry.own && PART.exec(entry.name)) || [];
      const leading = name && found.get(name);
      if (!leading) continue;
      found.delete(entry.name);
      leading.format = format;
      if (what !== "sum" && what !== "writes") leading.parts.push(entry);
    }
    return found;
  }

  const dtype = (entry) => entry.format ?? NAMES[entry.dtype] ?? entry.dtype;
  const size = (entry) => entry.shape.reduce((product, n) => product * n, 1);

  /* The values of some elements. */
  async function part(entry, from, count, Type) {
    const at = entry.begin + from * Type.BYTES_PER_ELEMENT;
    return new Type(
      await entry.file.slice(at, at + count * Type.BYTES_PER_ELEMENT).arrayBuffer(),
    );
  }

  /* What became of one tensor: shares as those of `audit`, and of each stretch of it that moved. */
  async function compareOne(before, after) {
    const total = size(before);
    const pairs = [[before, after]];
    before.parts.forEach((x, i) => pairs.push([x, after.parts[i]]));
    const kinds = pairs.map(([x]) => FLOATS[x.dtype] ?? INTEGERS[x.dtype]);
    const cells = Math.min(CELLS, total);
    const moved = new Float64Array(cells);
    let [same, zeros, ones] = [0, 0, 0];
    for (let from = 0; from < total; from += CHUNK) {
      const count = Math.min(CHUNK, total - from);
      const values = await Promise.all(
        pairs.flatMap((pair, i) => pair.map((x) => part(x, from, count, kinds[i].Type))),
      );
      const [kind] = kinds;
      const [x, y, ...tails] = values;
      for (let i = 0; i < count; i++) {
        let equal = kind.same(x[i], y[i]);
        let alone = equal;
        for (let k = 0; k < tails.length; k += 2) {
          const tail = kinds[1 + k / 2];
          equal = equal && tail.same(tails[k][i], tails[k + 1][i]);
          alone = alone && equal && tail.zero(tails[k][i]);
        }
        if (equal) same++;
        else moved[Math.floor(((from + i) * cells) / total)]++;
        if (alone && kind.zero(x[i])) zeros++;
        if (alone && kind.one(x[i])) ones++;
      }
    }
    const stretches = [...moved].map((n, i) => {
      const [from, to] = [i, i + 1].map((k) => Math.ceil((k * total) / cells));
      return n / (to - from);
    });
    const [unchanged, zero, one] = [same, zeros, ones].map((n) => n / total);
    const verdict = unchanged === 1 ? "frozen" : unchanged >= 0.5 ? "mostly frozen" : "moving";
    return {
      name: before.name,
      shape: before.shape,
      dtype: dtype(before),
      numel: total,
      unchanged,
      zeros: zero,
      ones: one,
      verdict,
      stretches,
    };
  }

  /* Compare two lists of files; `tell(done, all)` is called after each tensor. */
  async function compare(before, after, tell = () => {}) {
    const [old, found] = [await open(before), await open(after)];
    const lone = [
      ...[...old.keys()].filter((name) => !found.has(name)),
      ...[...found.keys()].filter((name) => !old.has(name)),
    ];
    const result = { tensors: [], integer: 0, empty: 0, refused: [], lone };
    let done = 0;
    for (const [name, x] of old) {
      tell(++done, old.size);
      const y = found.get(name);
      if (!y) continue;
      const parts = (entry) => entry.parts.map((p) => `${p.dtype} ${p.shape}`).join();
      if (`${x.shape}` !== `${y.shape}` || dtype(x) !== dtype(y) || parts(x) !== parts(y))
        result.refused.push(`${name}: its shape or dtype differs`);
      else if (LEFT_OUT.test(x.dtype) && !x.format) result.integer++;
      else if (size(x) === 0) result.empty++;
      else if (
        !(x.dtype in FLOATS) ||
        x.parts.some((p) => `${p.shape}` !== `${x.shape}` || !(p.dtype in { ...FLOATS, ...INTEGERS }))
      )
        result.refused.push(`${name}: ${dtype(x)} is compared by python -m mcftensor audit alone`);
      else result.tensors.push(await compareOne(x, y));
    }
    const natural = new Intl.Collator("en", { numeric: true }).compare;
    result.tensors.sort((a, b) => b.unchanged - a.unchanged || natural(a.name, b.name));
    return result;
  }

  const percent = (share) =>
    share === 0 || share === 1
      ? `${100 * share} %`
      : `${Math.min(Math.max(Math.round(1e4 * share) / 100, 0.01), 99.99)} %`;

  function summary({ tensors, integer, empty, refused, lone }) {
    const count = (verdict) => tensors.filter((t) => t.verdict === verdict).length;
    const elements = tensors.reduce((sum, t) => sum + t.numel, 0);
    const same = tensors.reduce((sum, t) => sum + t.unchanged * t.numel, 0);
    const rest = [
      [integer, "integer or boolean"],
      [empty, "empty"],
      [lone.length, "in one checkpoint only"],
      [refused.length, "not compared"],
    ].filter(([n]) => n);
    return (
      `${tensors.length} tensors: ${count("frozen")} frozen, ${count("mostly frozen")} mostly frozen; ` +
      `${percent(elements ? same / elements : 0)} of ${elements.toLocaleString("en")} elements unchanged` +
      (rest.length ? `; left out: ${rest.map(([n, words]) => `${n} ${words}`).join(", ")}` : "")
    );
  }

  return { open, compare, summary, percent };
})();

if (typeof module === "object") module.exports = checkpoints;

if (typeof document === "object")
  (() => {
    const { h, verdict } = calculators;
    const { compare, summary, percent } = checkpoints;

    function strip(stretches) {
      const cells = stretches.map((share) =>
        h("i", { style: `--moved: ${share}`, title: `${percent(share)} moved` }),
      );
      return h("span", { class: "strip", "aria-hidden": "true" }, cells);
    }

    function rows(tensors) {
      const heads = ["tensor", "shape", "dtype", "unchanged", "at 0", "at 1", "verdict", "moved"];
      return h(
        "table",
        {},
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h(
          "tbody",
          {},
          tensors.map((t) =>
            h(
              "tr",
              { class: t.verdict.split(" ").at(-1) },
              h("td", {}, t.name),
              h("td", {}, t.shape.join("×") || "scalar"),
              h("td", {}, t.dtype),
              [t.unchanged, t.zeros, t.ones].map((share) => h("td", { class: "number" }, percent(share))),
              h("td", {}, t.verdict),
              h("td", {}, strip(t.stretches)),
            ),
          ),
        ),
      );
    }

    function frozen(root) {
      const sides = ["before", "after"].map((name) => {
        const input = h("input", { type: "file", multiple: true, accept: ".safetensors", onchange: run });
        const element = h("label", { class: "file" }, h("span", {}, name), input);
        element.addEventListener("dragover", (event) => event.preventDefault());
        element.addEventListener("drop", (event) => {
          event.preventDefault();
          input.files = event.dataTransfer.files;
          run();
        });
        return { name, input, element };
      });
      const result = h("div", { class: "result", "aria-live": "polite" });
      root.replaceChildren(
        h("p", { class: "title" }, "Two checkpoints, and what moved"),
        h("div", { class: "controls" }, sides.map((side) => side.element)),
        result,
      );
      let turn = 0;

      async function run() {
        const [before, after] = sides.map((side) => [...side.input.files]);
        const mine = ++turn;
        if (!before.length || !after.length) return;
        const progress = h("p", { role: "status" }, "Reading …");
        result.replaceChildren(progress);
        try {
          const found = await compare(before, after, (done, all) => {
            if (mine === turn) progress.textContent = `Tensor ${done} of ${all} …`;
          });
          if (mine !== turn) return;
          const still = found.tensors.some((t) => t.verdict !== "moving");
          const notes = [...found.lone.map((name) => `${name}: in one checkpoint only`), ...found.refused];
          result.replaceChildren(
            verdict(!still && found.tensors.length > 0, summary(found)),
            h("div", { class: "scroll" }, rows(found.tensors)),
            h("ul", {}, notes.map((note) => h("li", {}, note))),
          );
        } catch (error) {
          if (mine === turn) result.replaceChildren(verdict(false, error.message));
        }
      }
    }

    calculators.start({ frozen });
  })();
