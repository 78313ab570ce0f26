/* The calculators of the lessons. */

"use strict";

(() => {
  const { FORMATS } = floats;
  const { h, svg, field, choice, read, numeral, show, brief, superscript, code } = calculators;
  const { verdict, calculator, examples, ticks, followWidth } = calculators;
  const HALVES = ["bf16", "fp16"];

  // -------------------------------------------------------------------------------------- bits

  /* Significands over one axis of powers of two. A row has a name, a colour, and an exact value
  as m * 2^k; `bits` is how many it has room for, so that zeros at the end show. Powers that no row
  has are left out, and a mark stands for them. */
  function picture(rows) {
    const finite = rows
      .filter((row) => row.exact && row.exact[0] !== 0n)
      .map((row) => ({ row, ...floats.digits(row.exact) }));
    const powers = new Set();
    for (const { row, high, bits } of finite) {
      row.last = Math.max(high - Math.max(bits.length, row.bits || 0) + 1, row.least ?? -Infinity);
      row.last = Math.min(row.last, high - bits.length + 1);
      for (let power = high; power >= row.last; power--) powers.add(power);
    }
    const columns = [];
    for (const power of [...powers].sort((p, q) => q - p)) {
      if (columns.length && columns.at(-1) !== power + 1) columns.push(null);
      columns.push(power);
    }
    const width = Math.max(...columns.map((power) => String(power ?? 0).length)); // of a label
    const every =
      [1, 2, 4, 8].find((step) => step >= width / 2 && (columns.length * width) / step <= 24) || 16;
    const heads = columns.map((power) =>
      power === null
        ? h("span", { class: "gap", title: "powers left out" }, "⋯")
        : h("span", { class: "power" }, power % every === 0 ? `2${superscript(power)}` : ""),
    );
    const grid = h("div", { class: "bits", style: `--n: ${Math.max(columns.length, 1)}` });
    if (columns.length) grid.append(h("span", { class: "name" }), ...heads);
    for (const row of rows) {
      const digits = finite.find((entry) => entry.row === row);
      const value = row.exact ? (digits ? "" : show(row.value ?? 0)) : show(row.value);
      const sign = digits && digits.negative ? h("span", { class: "sign" }, " −") : undefined;
      const label = h(
        "span",
        { class: `name ${row.colour || ""}` },
        row.name,
        sign,
        h("b", {}, ` ${value}`),
      );
      grid.append(label);
      if (!digits) {
        grid.append(h("span", { class: "none" }));
        continue;
      }
      const cells = columns.map((power) => {
        if (power === null || power > digits.high || power < row.last) return h("i");
        const digit = digits.bits[digits.high - power] || "0";
        const first = power === digits.high && digits.negative ? " minus" : "";
        return h(
          "i",
          { class: `bit ${row.colour || ""}${digit === "1" ? " one" : ""}${first}` },
          digit,
        );
      });
      grid.append(...cells);
    }
    grid.setAttribute("role", "img");
    grid.setAttribute(
      "aria-label",
      rows
        .map((row) => `${row.name}: ${row.value === undefined ? "exact" : show(row.value)}`)
        .join("; "),
    );
    return grid;
  }

  const row = (name, value, colour, format) => ({
    name,
    value,
    colour,
    bits: format.precision,
    least: Math.log2(format.tiny),
    exact: Number.isFinite(value) ? floats.dyadic(value) : undefined,
  });

  const exactRow = (name, exact) => ({ name, exact, colour: "fourth" });

  const lines = (entries) =>
    h(
      "ol",
      { class: "lines" },
      entries.map(([text, value]) => h("li", {}, code(text), " ", h("b", {}, show(value)))),
    );

  // ------------------------------------------------------------------------------- one number

  function number(root) {
    let update = () => {};
    let format = FORMATS.bf16;
    const x = numeral("number", "1", () => update());
    const kinds = choice(HALVES, "bf16", () => update());
    const held = h("div", {
      class: "pattern",
      role: "group",
      "aria-label": "The 16 bits, each a switch",
    });
    const write = (value) => {
      x.set(show(value).replace("−", "-"));
      update();
    };
    const step = (side) => () => {
      const value = floats.round(read(x.input.value, format) ?? NaN, format);
      if (Number.isFinite(value)) write(floats.neighbours(value, format)[side]);
    };

    function cells(value) {
      const bits = floats.toBits(value, format);
      const fraction = format.precision - 1;
      held.replaceChildren(
        ...Array.from({ length: 16 }, (_, i) => {
          const place = 15 - i;
          const part = place === 15 ? "third" : place >= fraction ? "second" : "first";
          const what =
            place === 15
              ? "sign"
              : place >= fraction
                ? `exponent, bit ${place - fraction}`
                : `fraction, bit ${place}`;
          const on = (bits >> place) & 1;
          const flip = () => {
            const flipped = bits ^ (1 << place);
            const found = floats.fromBits(flipped, format);
            x.set(Number.isNaN(found) ? "nan" : show(found).replace("−", "-"));
            update();
            held.children[i].focus();
          };
          return h(
            "button",
            {
              type: "button",
              class: `bit ${part}${on ? " one" : ""}`,
              "aria-pressed": String(!!on),
              "aria-label": what,
              title: what,
              onclick: flip,
            },
            String(on),
          );
        }),
      );
    }

    const fill = ([text]) => {
      x.set(text);
      update();
    };
    update = calculator(
      root,
      "A number, as the machine holds it",
      { number: x.input, format: kinds },
      [
        field("format", kinds),
        x.element,
        h("button", { type: "button", onclick: step(0) }, "next below"),
        h("button", { type: "button", onclick: step(1) }, "next above"),
        examples(
          {
            1: ["1"],
            0.999: ["0.999"],
            0.1: ["0.1"],
            least: ["0x0001"],
            largest: ["0x7f7f"],
            "−0": ["-0"],
            "∞": ["inf"],
          },
          ([text]) => fill([text === "0x7f7f" ? String(format.max) : text]),
        ),
      ],
      () => {
        format = FORMATS[kinds.value];
        const value = x.value(format);
        cells(value);
        const bits = floats.toBits(value, format);
        const fraction = format.precision - 1;
        const biased = (bits & 0x7fff) >> fraction;
        const rest = (bits & ((1 << fraction) - 1)).toString(2).padStart(fraction, "0");
        const power = Math.max(biased, 1) - format.most;
        const parts = [
          held,
          h(
            "p",
            { class: "legend" },
            h("span", { class: "third" }, "sign"),
            h("span", { class: "second" }, `exponent, ${15 - fraction} bits`),
            h("span", { class: "first" }, `fraction, ${fraction} bits`),
          ),
        ];
        if (!Number.isFinite(value)) {
          parts.push(
            h(
              "p",
              {},
              Number.isNaN(value)
                ? "All bits of the exponent are set, and one of the fraction: not a number."
                : "All bits of the exponent are set, and none of the fraction: infinity.",
            ),
          );
          return parts;
        }
        const [below, above] = floats.neighbours(value, format);
        const sign = bits & 0x8000 ? "−" : "+";
        parts.push(
          h(
            "p",
            {},
            "value = ",
            code(`${sign}${biased ? 1 : 0}.${rest}₂ × 2${superscript(power)}`),
            " = ",
            h("b", {}, show(value)),
            biased ? "" : value === 0 ? ", zero" : ", a subnormal number: no leading 1",
          ),
        );
        parts.push(
          lines([
            ["next below", below],
            ["next above", above],
            ["ulp", floats.ulp(value, format)],
          ]),
        );
        return parts;
      },
    );
    update();
  }

  // ------------------------------------------------------------------------- does it move?

  /* A chart at the size of its place: text stays text on a phone. */
  function chart(width, path, exact, update, first) {
    const height = 220,
      left = 64,
      right = 12,
      top = 12,
      bottom = 34;
    const all = [...path, ...exact].filter(Number.isFinite);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    if (high - low < Math.abs(first) * 1e-9)
      [low, high] = [low - (Math.abs(first) || 1) * 1e-3, high + (Math.abs(first) || 1) * 1e-3];
    const margin = 0.06 * (high - low);
    [low, high] = [low - margin, high + margin];
    const last = path.length - 1;
    const x = (step) => left + (step / last) * (width - left - right);
    const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
    const style = (name) =>
      `fill:none;stroke:var(--figure-${name});stroke-width:2;stroke-linejoin:round`;
    const parts = [];
    for (const value of ticks(low, high, 3)) {
      parts.push(
        svg("line", {
          x1: left,
          x2: width - right,
          y1: y(value),
          y2: y(value),
          style: "stroke:var(--figure-faint)",
        }),
      );
      parts.push(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value));
    }
    for (const step of [0, last / 2, last])
      parts.push(
        svg(
          "text",
          { x: x(step), y: height - 14, "text-anchor": step === last ? "end" : "middle" },
          step === last ? `${last} steps` : String(step),
        ),
      );
    const stairs = path.flatMap((value, step) =>
      step
        ? [`${x(step)},${y(path[step - 1])}`, `${x(step)},${y(value)}`]
        : [`${x(0)},${y(value)}`],
    );
    parts.push(
      svg("polyline", {
        points: exact.map((value, step) => `${x(step)},${y(value)}`).join(" "),
        style: style("ink") + ";stroke-dasharray:2 5",
      }),
    );
    parts.push(svg("polyline", { points: stairs.join(" "), style: style("first") }));
    return svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      ...parts,
    );
  }

  function walk(root) {
    let update = () => {};
    const change = () => update();
    const weight = numeral("weight", "1", change);
    const slider = (label, attributes, text) => {
      const output = h("output", {});
      const input = h("input", { type: "range", ...attributes, oninput: change });
      const element = h("label", { class: "wide" }, h("span", {}, label, " ", output), input);
      return {
        element,
        input,
        value() {
          const value = text.value(Number(input.value));
          output.textContent = text.show(value);
          return value;
        },
      };
    };
    const rate = slider(
      "learning rate",
      { min: -60, max: -10, step: 1, value: -40 },
      {
        value: (k) => Number((10 ** (k / 10)).toPrecision(2)),
        show: (v) => v.toExponential().replace("e", "e"),
      },
    );
    const count = slider(
      "steps",
      { min: 1, max: 100, step: 1, value: 20 },
      { value: (k) => 10 * k, show: String },
    );
    const kinds = ["bf16", "bf16x2", "bf16x3", "fp16", "fp16x2"];
    const kind = choice(kinds, "bf16", change);
    update = calculator(
      root,
      "Does it move?",
      { weight: weight.input, format: kind, rate: rate.input, steps: count.input },
      [
        weight.element,
        field("format", kind),
        rate.element,
        count.element,
        examples(
          {
            "1 in bf16": ["1", -40, "bf16"],
            "0.02 in bf16": ["0.02", -40, "bf16"],
            "1 in two terms": ["1", -40, "bf16x2"],
            "1, 1e-5, two terms": ["1", -50, "bf16x2"],
            "1, 1e-5, three": ["1", -50, "bf16x3"],
          },
          ([text, exponent, name]) => {
            weight.set(text);
            rate.input.value = exponent;
            kind.value = name;
            update();
          },
        ),
      ],
      () => {
        const format = FORMATS[kind.value.split("x")[0]];
        const start = weight.value(format),
          size = rate.value(),
          steps = count.value();
        if (!Number.isFinite(start))
          return [verdict(false, "Give the weight as a number, such as 1 or 0.02.")];
        const found = floats.walk(start, size, steps, kind.value);
        const path = found.map((terms) => terms.reduceRight((sum, term) => sum + term));
        const exact = path.map((_, step) => start - step * size);
        const share = (path[steps] - start) / (exact[steps] - start);
        // The spacing of what is stored: below the weight, or of the least term next to it.
        let gap = start - floats.neighbours(start, format)[0];
        for (const _ of found[0].slice(1)) gap = floats.ulp(gap / 2, format);
        const half = gap / 2;
        const numbers = `half of the gap ${found[0].length > 1 ? "in its last term" : "below it"}, ${brief(half)},`;
        const why =
          half > size
            ? `${numbers} is more than ${size}.`
            : share === 0
              ? `${numbers} is a tie with ${size}.`
              : `${numbers} is less than ${size}${Math.abs(share - 1) < 0.05 ? "" : ", and each update moves it by whole gaps"}.`;
        const text =
          share === 0
            ? `${steps} updates of ${size}, and the weight is where it was: ${why}`
            : `The weight went ${Math.round(100 * share)} % of the way, from ${show(start)} to ${show(path[steps])}; exact is ${show(Number(exact[steps].toPrecision(8)))}. ${why[0].toUpperCase()}${why.slice(1)}`;
        const place = h(
          "div",
          { class: "chart", role: "img", "aria-label": text },
          chart(Math.max(root.clientWidth - 26, 240), path, exact, size, start),
        );
        const legend = h(
          "p",
          { class: "legend" },
          h("span", { class: "first" }, kind.value),
          h("span", { class: "ink" }, "exact, dotted"),
        );
        return [place, legend, verdict(Math.abs(share - 1) < 0.05, text)];
      },
    );
    update();
    followWidth(root, update);
  }

  // ------------------------------------------------------------- sums, products, and their errors

  const TRANSFORMATIONS = {
    two_sum: (a, b, format) => {
      const t = floats.twoSum(a, b, format);
      return {
        sign: "+",
        why: `The error of a sum, ${brief(t.e)}, is always a ${format.name} number.`,
        s: t.s,
        e: t.e,
        exact: floats.plus,
        steps: [
          ["s = RN(a + b)", t.s],
          ["bb = RN(s − a)", t.bb],
          ["aa = RN(s − bb)", t.aa],
          ["RN(a − aa)", t.da],
          ["RN(b − bb)", t.db],
          ["e = RN of these two added", t.e],
        ],
      };
    },
    fast_two_sum: (a, b, format) => {
      const t = floats.fastTwoSum(a, b, format);
      return {
        sign: "+",
        why:
          Math.abs(a) >= Math.abs(b)
            ? "|a| ≥ |b|, as fast_two_sum needs."
            : "That is luck: |a| < |b|, but here no step is rounded.",
        s: t.s,
        e: t.e,
        exact: floats.plus,
        steps: [
          ["s = RN(a + b)", t.s],
          ["z = RN(s − a)", t.z],
          ["e = RN(b − z)", t.e],
        ],
        order: Math.abs(a) >= Math.abs(b),
      };
    },
    two_prod: (a, b, format) => {
      const t = floats.twoProd(a, b, format);
      return {
        sign: "·",
        why: `The product has at most ${2 * format.precision} bits, and p and e hold ${format.precision} each.`,
        s: t.p,
        e: t.e,
        exact: floats.times,
        steps: [
          ["p = RN(a · b)", t.p],
          ["e = RN(a · b − p)", t.e],
        ],
      };
    },
  };

  function sum(root) {
    let update = () => {};
    const change = () => update();
    const kinds = choice(HALVES, "bf16", change);
    const names = Object.keys(TRANSFORMATIONS);
    const operation = choice(
      names,
      names.includes(root.dataset.operation) ? root.dataset.operation : "two_sum",
      change,
    );
    const a = numeral("a", root.dataset.a || "1.3125", change);
    const b = numeral("b", root.dataset.b || "0.0101", change);
    const fill = ([name, first, second, format]) => {
      operation.value = name;
      a.set(first);
      b.set(second);
      kinds.value = format || "bf16";
      update();
    };
    update = calculator(
      root,
      "Two numbers, and what one operation loses",
      { operation, format: kinds, a: a.input, b: b.input },
      [
        field("operation", operation),
        field("format", kinds),
        a.element,
        b.element,
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              const [first, second] = [a, b].map((x) => x.input.value);
              a.set(second);
              b.set(first);
              update();
            },
          },
          "swap",
        ),
        examples(
          {
            "1 − 0.0001": ["two_sum", "1", "-0.0001"],
            "a tie": ["two_sum", "1", "2^-8"],
            "out of order": ["fast_two_sum", "1.5", "256"],
            overflow: ["two_sum", "3.38e38", "3e38"],
            subnormal: ["two_sum", "0x0081", "0x8003"],
            "a product": ["two_prod", "1.4453125", "1.2421875"],
            "error too small": ["two_prod", "0.0301", "0.0371", "fp16"],
          },
          fill,
        ),
      ],
      () => {
        const format = FORMATS[kinds.value];
        const [p, q] = [a.value(format), b.value(format)];
        const found = TRANSFORMATIONS[operation.value](p, q, format);
        const name = found.sign === "·" ? "p" : "s";
        const rows = [row("a", p, "ink", format), row("b", q, "ink", format)];
        const finite = [p, q, found.s, found.e].every(Number.isFinite);
        let end;
        if (![p, q].every(Number.isFinite)) {
          end = verdict(false, "Infinities and NaNs have no error: e says nothing here.");
        } else {
          const exact = found.exact(floats.dyadic(p), floats.dyadic(q));
          rows.push(exactRow(`a ${found.sign} b`, exact));
          const right =
            finite &&
            floats.equal(exact, floats.plus(floats.dyadic(found.s), floats.dyadic(found.e)));
          end = !finite
            ? verdict(false, "The sum overflows, so e is not its error.")
            : right
              ? verdict(true, `${name} + e = a ${found.sign} b, exactly. ${found.why}`)
              : verdict(
                  false,
                  `${name} + e is not a ${found.sign} b: ${found.order === false ? "fast_two_sum needs |a| ≥ |b|, and a is the smaller one." : found.sign === "·" ? `the error is smaller than ${brief(format.tiny)}, the least number of ${format.name}.` : "a step on the way was rounded."}`,
                );
        }
        rows.push(row(name, found.s, "first", format), row("e", found.e, "second", format));
        return [
          h(
            "p",
            {},
            code("a"),
            " = ",
            h("b", {}, show(p)),
            ", ",
            code("b"),
            " = ",
            h("b", {}, show(q)),
            `, rounded to ${format.name}`,
          ),
          picture(rows),
          lines(found.steps),
          end,
        ];
      },
    );
    update();
  }

  // ---------------------------------------------------------------------- one rounding or two

  function fma(root) {
    let update = () => {};
    const change = () => update();
    const kinds = choice(HALVES, "bf16", change);
    const [a, b, c] = [
      ["a", "1.0078125"],
      ["b", "1.0078125"],
      ["c", "-1.015625"],
    ].map(([name, text]) => numeral(name, text, change));
    update = calculator(
      root,
      "a · b + c, rounded once or twice",
      { format: kinds, a: a.input, b: b.input, c: c.input },
      [
        field("format", kinds),
        a.element,
        b.element,
        c.element,
        examples(
          {
            "the product cancels": ["1.0078125", "1.0078125", "-1.015625"],
            "a third": ["1/3", "3", "-1"],
            "no difference": ["1.5", "2", "0.1"],
            "one ulp": ["1.1", "1.3", "1"],
          },
          (values) => {
            [a, b, c].forEach((x, i) => x.set(values[i]));
            update();
          },
        ),
      ],
      () => {
        const format = FORMATS[kinds.value];
        const [x, y, z] = [a, b, c].map((control) => control.value(format));
        const product = floats.round(Math.fround(x * y), format);
        const twice = floats.round(product + z, format);
        const once = floats.fma(x, y, z, format);
        const rows = [];
        if ([x, y, z].every(Number.isFinite)) {
          const exact = floats.times(floats.dyadic(x), floats.dyadic(y));
          rows.push(
            exactRow("a · b", exact),
            row("c", z, "ink", format),
            exactRow("a · b + c", floats.plus(exact, floats.dyadic(z))),
          );
        }
        rows.push(
          row("p", product, "ink", format),
          row("twice", twice, "third", format),
          row("once", once, "first", format),
        );
        const same = Object.is(once, twice);
        const lost = Math.abs(x * y - product); // of 24 bits at most: exact in a double
        const gap = floats.ulp(once, format);
        const why = !Number.isFinite(once - twice)
          ? "Infinities and NaNs have no rounding error."
          : lost === 0
            ? "The same: a · b is a number of the format, so the first rounding loses nothing."
            : `${same ? "The same" : "They differ"}: the first rounding lost ${brief(lost)}, and the numbers around the result are ${brief(gap)} apart.`;
        return [
          h(
            "p",
            {},
            code("a"),
            " = ",
            h("b", {}, show(x)),
            ", ",
            code("b"),
            " = ",
            h("b", {}, show(y)),
            ", ",
            code("c"),
            " = ",
            h("b", {}, show(z)),
          ),
          picture(rows),
          lines([
            ["p = RN(a · b)", product],
            ["twice = RN(p + c)", twice],
            ["once = RN(a · b + c), the fma", once],
          ]),
          verdict(true, why),
        ];
      },
    );
    update();
  }

  // --------------------------------------------------------------------------- renormalization

  function renormalize(root) {
    let update = () => {};
    const restart = () => {
      slider.value = 0;
      update();
    };
    const kinds = choice(HALVES, "bf16", restart);
    const terms = choice(["2", "3"], "2", restart);
    const texts = ["1", "0.75", "-3", "0.001"];
    const fields = texts.map((text, i) => numeral(`x${"₁₂₃₄"[i]}`, text, restart));
    const slider = h("input", {
      type: "range",
      min: 0,
      max: 1,
      value: 0,
      step: 1,
      "aria-label": "step",
      oninput: () => update(),
    });
    const move = (by) => () => {
      slider.value = Number(slider.value) + by;
      update();
    };
    const back = h("button", { type: "button", onclick: move(-1) }, "back");
    const next = h("button", { type: "button", onclick: move(1) }, "next");
    const WHAT = {
      two_sum: "two_sum: the sum stays in front, its error behind",
      tie: "a tie, decided anew by what stands behind",
      fast_two_sum: "fast_two_sum closes a gap",
      last: "fast_two_sum of the last two terms",
    };
    update = calculator(
      root,
      "Renormalization, step by step",
      {
        format: kinds,
        terms,
        ...Object.fromEntries(fields.map((x, i) => [`x${i + 1}`, x.input])),
        step: slider,
      },
      [
        field("format", kinds),
        field("terms", terms),
        fields.map((x) => x.element),
        examples(
          {
            overlapping: ["1", "0.75", "-3", "0.001"],
            "in disorder": ["0.001", "100", "-0.3", "7"],
            cancelling: ["1", "2^-12", "-1", "2^-20"],
            "a tie": ["1", "2^-8", "2^-18", "0"],
            "too many bits": ["2^-18", "1", "2^-27", "2^-9"],
          },
          (values) => {
            fields.forEach((x, i) => x.set(values[i]));
            restart();
          },
        ),
        h("div", { class: "stepper" }, back, slider, next),
      ],
      () => {
        const format = FORMATS[kinds.value];
        const values = fields.map((x) => x.value(format));
        const states = [{ places: values, text: "Four values, in any order." }];
        let idle = 0;
        const result = floats.renormalize(values, Number(terms.value), format, (name, i, j, x) => {
          const before = states.at(-1).places;
          if (x.every((value, k) => Object.is(value, before[k] ?? 0))) idle++;
          else
            states.push({
              places: [...x],
              text: `Places ${i + 1} and ${j + 1}: ${WHAT[name]}.`,
              touched: [i, j],
            });
        });
        states.push({
          places: result,
          text: `The ${terms.value} terms. (${idle} more steps of the algorithm had nothing to do.)`,
        });
        slider.max = states.length - 1;
        const at = Math.min(Number(slider.value), states.length - 1);
        back.disabled = at === 0;
        next.disabled = at === states.length - 1;
        const { places, text, touched = [] } = states[at];
        const colours = ["first", "second", "third", "fourth"];
        const rows = places
          .slice(0, 4)
          .map((value, i) =>
            row(`${touched.includes(i) ? "→ " : ""}x${"₁₂₃₄"[i]}`, value, colours[i], format),
          );
        const parts = [
          h("p", { role: "status" }, h("b", {}, `${at} of ${states.length - 1}. `), text),
          picture(rows),
          lines(places.slice(0, 4).map((value, i) => [`x${"₁₂₃₄"[i]}`, value])),
        ];
        if (at === states.length - 1 && [...values, ...result].every(Number.isFinite)) {
          const total = (list) => list.map(floats.dyadic).reduce(floats.plus);
          const good = floats.equal(total(values), total(result));
          const half = brief(floats.ulp(result.at(-1), format) / 2);
          parts.push(
            verdict(
              good,
              good
                ? `Their sum is that of the four values, exactly: ${terms.value} terms are enough for its bits.`
                : `The sum needs more than ${terms.value} terms. What is dropped is at most half an ulp of the last one, ${half}.`,
            ),
          );
        }
        return parts;
      },
    );
    update();
  }

  calculators.start({ number, walk, sum, fma, renormalize });
})();
