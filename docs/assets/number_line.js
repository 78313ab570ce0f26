/* A number line over all of a format: the weight a dot, its update an arrow. */

"use strict";

(() => {
  const { FORMATS } = floats;
  const { h, svg, field, choice, numeral, show, brief } = calculators;
  const { verdict, calculator, examples, ticks, followWidth } = calculators;

  const ALONE = "alone";
  /* What can follow the leading number: the format of the grid, and how many terms it has. */
  const KINDS = {
    bf16: {
      [ALONE]: ["bf16", 1],
      "a second term": ["bf16", 2],
      "an 8-bit tail": ["bf16i8", 1],
      "a 16-bit tail": ["fp32", 1],
    },
    fp16: { [ALONE]: ["fp16", 1], "a second term": ["fp16", 2] },
    tf32: { [ALONE]: ["tf32", 1] },
    fp32: { [ALONE]: ["fp32", 1], "a second term": ["fp32", 2] },
    e4m3: { [ALONE]: ["e4m3", 1] },
    e5m2: { [ALONE]: ["e5m2", 1] },
  };
  const HEIGHT = 150;
  const AXIS = 96;
  const TICK = 4; // pixels between the places at which numbers are looked up

  const hidden = (value) => h("input", { type: "hidden", value });

  function line(root) {
    let update = () => {};
    let step; // of an animation: from, towards, to
    let count = 0;
    const change = () => {
      count = 0;
      update();
    };
    const format = choice(Object.keys(KINDS), "bf16", () => {
      rest.value = ALONE;
      change();
    });
    const rest = choice(Object.keys(KINDS.bf16), ALONE, change);
    const rounding = choice(["to nearest", "balanced"], "to nearest", change);
    const weight = numeral("weight", "1", change);
    const by = numeral("update", "-0.0016", change);
    const [centre, span] = [hidden(1), hidden(0.03)];
    const stage = h("div", {
      class: "stage",
      tabindex: "0",
      role: "application",
      "aria-label": "Number line. Arrow keys move it, plus and minus zoom, Home shows the weight.",
    });

    // --------------------------------------------------------------------------- what is in view

    const view = () => [Number(centre.value), Number(span.value)];

    function aim(at, width) {
      const { max, tiny } = FORMATS[kind()[0]];
      const least = Math.max(Math.abs(at) * 2 ** -44, 4 * tiny);
      span.value = Math.min(Math.max(width, least), 2.2 * max);
      centre.value = Math.min(Math.max(at, -max), max);
    }

    function look(at, width) {
      aim(at, width);
      update();
      root.dispatchEvent(new Event("change"));
    }

    const pan = (share) => look(view()[0] + share * view()[1], view()[1]);

    /* Zoom so that the value under a place stays there; places go from 0 to 1. */
    function zoom(factor, place = 0.5) {
      const [at, width] = view();
      look(at + (place - 0.5) * width * (1 - factor), width * factor);
    }

    const kind = () => KINDS[format.value][rest.value] ?? KINDS[format.value][ALONE];
    const near = (x) => floats.around(x, FORMATS[kind()[0]], kind()[1]);
    function stored() {
      weight.value(FORMATS[format.value]); // for its hint
      return near(weight.exact(FORMATS[format.value]))[2];
    }

    /* The weight in the middle, and its update in view. */
    function home(put = look) {
      const at = stored();
      const size = Math.abs(by.exact(FORMATS[format.value]));
      const wide = floats.ulp(at, FORMATS[format.value]);
      put(at, kind()[1] > 1 ? 4 * size : Math.max(4 * wide, 3 * size));
    }
    const all = () => look(0, Infinity);

    stage.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => pan(-1 / 8),
        ArrowRight: () => pan(1 / 8),
        "+": () => zoom(1 / 2),
        "=": () => zoom(1 / 2),
        "-": () => zoom(2),
        Home: () => home(),
        End: all,
      }[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
    stage.addEventListener(
      "wheel",
      (event) => {
        if (document.activeElement !== stage && !event.ctrlKey) return; // the page scrolls
        event.preventDefault();
        const box = stage.getBoundingClientRect();
        zoom(2 ** (event.deltaY / 200), (event.clientX - box.left) / box.width);
      },
      { passive: false },
    );
    // One finger or button moves the line, or zooms where it goes up and down; two fingers pinch.
    const fingers = new Map();
    const apart = () => {
      const [p, q] = [...fingers.values()];
      return Math.max(Math.hypot(p.x - q.x, p.y - q.y), 10);
    };
    stage.addEventListener("pointerdown", (event) => {
      stage.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    });
    stage.addEventListener("pointermove", (event) => {
      const from = fingers.get(event.pointerId);
      if (!from) return;
      const to = { x: event.clientX, y: event.clientY };
      const box = stage.getBoundingClientRect();
      if (fingers.size === 2) {
        const before = apart();
        fingers.set(event.pointerId, to);
        const middle = [...fingers.values()].reduce((sum, p) => sum + p.x, 0) / 2;
        zoom(before / apart(), (middle - box.left) / box.width);
      } else {
        fingers.set(event.pointerId, to);
        if (event.pointerType === "mouse" && Math.abs(to.y - from.y) > Math.abs(to.x - from.x))
          zoom(2 ** ((to.y - from.y) / 60), (to.x - box.left) / box.width);
        else pan((from.x - to.x) / box.width);
      }
    });
    for (const end of ["pointerup", "pointercancel"])
      stage.addEventListener(end, (event) => fingers.delete(event.pointerId));

    // -------------------------------------------------------------------------------- the update

    /* Where an update takes the weight, and the words for it. */
    function outcome() {
      const from = stored();
      const size = by.exact(FORMATS[format.value]);
      const towards = from + size;
      const [below, above, nearest] = near(towards);
      const gap = above - below;
      const share = gap ? (towards - below) / gap : 0; // how often balanced rounding goes up
      const turn = ((count + 1) * 0.6180339887498949) % 1;
      const to = rounding.value === "balanced" ? (turn < share ? above : below) : nearest;
      return { from, size, towards, below, above, gap, share, to };
    }

    function words({ from, size, towards, below, above, gap, share, to }) {
      const sum = `${show(from)} ${size < 0 ? "−" : "+"} ${show(Math.abs(size))}`;
      if (![from, towards, below, above].every(Number.isFinite))
        return [false, `${sum} leaves the range of ${format.value}.`];
      if (gap === 0) return [true, `${sum} = ${show(towards)} is a number of the format.`];
      const [stay, move] = [from === below || from === above, (from === below ? share : 1 - share)];
      const ends = `${show(below)} and ${show(above)}`;
      if (rounding.value === "balanced" && stay)
        return [
          true,
          `${sum} lies between ${ends}. Balanced rounding moves the weight in ${brief(100 * move)} % of the steps, by the whole gap of ${brief(gap)}: the mean is right.`,
        ];
      if (rounding.value === "balanced")
        return [true, `${sum} lies between ${ends}, and goes to each so often that the mean is right.`];
      const half = brief(gap / 2);
      if (to === from)
        return [
          false,
          `The weight stays at ${show(from)}: half of the gap to its neighbour, ${half}, is ${Math.abs(size) === gap / 2 ? "a tie with" : "more than"} ${show(Math.abs(size))}.`,
        ];
      const arrived = (to - from) / size;
      return [
        Math.abs(arrived - 1) < 0.05,
        `The weight moves to ${show(to)}. ${brief(100 * arrived)} % of the update arrives: the numbers around ${show(Number(towards.toPrecision(9)))} are ${brief(gap)} apart.`,
      ];
    }

    const reduced = matchMedia("(prefers-reduced-motion: reduce)");
    const advance = () => {
      const found = outcome();
      step = reduced.matches ? undefined : found;
      count += 1;
      weight.set(String(found.to));
      update();
      step = undefined;
    };

    // --------------------------------------------------------------------------------- the line

    function draw(width, found) {
      const [at, wide] = view();
      const [low, high] = [at - wide / 2, at + wide / 2];
      const place = (value) => ((value - low) / wide) * width;
      const inside = (value) => value >= low && value <= high;
      const numbers = new Set();
      const places = Math.floor(width / TICK);
      for (let i = 0; i <= places; i++) numbers.add(near(low + (i / places) * wide)[2]);
      const dense = numbers.size > 0.7 * places;
      const parts = [];
      const rule = (x, top, bottom, colour, more = "") =>
        parts.push(
          svg("line", {
            x1: x,
            x2: x,
            y1: top,
            y2: bottom,
            style: `stroke:var(--figure-${colour});${more}`,
          }),
        );
      for (const value of ticks(low, high, Math.max(2, Math.floor(width / 110)))) {
        rule(place(value), AXIS + 16, AXIS + 22, "soft");
        parts.push(
          svg("text", { x: place(value), y: AXIS + 36, "text-anchor": "middle" }, show(value)),
        );
      }
      parts.push(
        svg("line", { x1: 0, x2: width, y1: AXIS, y2: AXIS, style: "stroke:var(--figure-soft)" }),
      );
      if (dense)
        parts.push(
          svg("rect", {
            x: 0,
            y: AXIS - 12,
            width,
            height: 24,
            style: "fill:var(--figure-first);opacity:0.35",
          }),
        );
      else
        for (const value of numbers)
          if (inside(value)) rule(place(value), AXIS - 12, AXIS + 12, "first", "stroke-width:1.6");
      const { from, towards, to } = step ?? found;
      const [x, y, z] = [from, towards, to].map((v) => Math.min(Math.max(place(v), -20), width + 20));
      parts.push(
        svg("path", {
          d: `M${x},${AXIS - 34}H${y}m${y < x ? 7 : -7},-5l${y < x ? -7 : 7},5l${y < x ? 7 : -7},5`,
          style: "fill:none;stroke:var(--figure-second);stroke-width:2",
        }),
        svg("line", {
          x1: y,
          x2: z,
          y1: AXIS - 30,
          y2: AXIS - 6,
          style: "stroke:var(--figure-second);stroke-dasharray:2 4",
        }),
      );
      const dot = svg("circle", { cx: step ? z : x, cy: AXIS, r: 6, style: "fill:var(--figure-ink)" });
      if (step) {
        const path = { dur: "1s", keyTimes: "0;0.55;0.7;1", fill: "freeze" };
        dot.append(
          svg("animate", { attributeName: "cx", values: `${x};${y};${y};${z}`, ...path }),
          svg("animate", {
            attributeName: "cy",
            values: `${AXIS};${AXIS - 34};${AXIS - 34};${AXIS}`,
            ...path,
          }),
        );
      }
      parts.push(dot);
      return [svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT }, ...parts), dense];
    }

    /* How many numbers are in view, where they have one term. */
    function population() {
      const [name, terms] = kind();
      const used = FORMATS[name];
      const [at, wide] = view();
      if (terms > 1) return "";
      const index = (x) => floats.index(Math.min(Math.max(x, -used.max), used.max), used);
      const found = Math.floor(index(at + wide / 2)) - Math.ceil(index(at - wide / 2)) + 1;
      return `${Math.max(found, 0).toLocaleString("en")} numbers in view. `;
    }

    const fill = ([name, more, round, text, size]) => {
      format.value = name;
      rest.value = more;
      rounding.value = round;
      weight.set(text);
      by.set(size);
      count = 0;
      home();
    };
    const button = (text, onclick, more = {}) => h("button", { type: "button", onclick, ...more }, text);
    const NEAREST = "to nearest";
    update = calculator(
      root,
      "A number line",
      {
        format,
        with: rest,
        rounding,
        weight: weight.input,
        update: by.input,
        centre,
        span,
      },
      [
        field("format", format),
        field("with", rest),
        field("rounding", rounding),
        weight.element,
        by.element,
        button("step", advance),
        examples(
          {
            "lost in bf16": ["bf16", ALONE, NEAREST, "1", "-0.0016"],
            "twice too far": ["bf16", ALONE, NEAREST, "1", "-0.0021"],
            "balanced": ["bf16", ALONE, "balanced", "1", "-0.0016"],
            "a second term": ["bf16", "a second term", NEAREST, "1", "-0.0016"],
            "an 8-bit tail": ["bf16", "an 8-bit tail", NEAREST, "1", "-0.0016"],
            "fp8": ["e4m3", ALONE, NEAREST, "1", "-0.05"],
            "near zero": ["fp16", ALONE, NEAREST, "2^-24", "2^-25"],
          },
          fill,
        ),
        stage,
        h(
          "div",
          { class: "stepper" },
          button("−", () => zoom(4), { "aria-label": "zoom out" }),
          button("+", () => zoom(1 / 4), { "aria-label": "zoom in" }),
          button("◀", () => pan(-1 / 4), { "aria-label": "left" }),
          button("▶", () => pan(1 / 4), { "aria-label": "right" }),
          button("the weight", () => home()),
          button("all of the format", all),
        ),
      ],
      () => {
        for (const option of rest.options)
          option.disabled = KINDS[format.value][option.value] === undefined;
        if (rest.selectedOptions[0]?.disabled) rest.value = ALONE;
        const found = outcome();
        const [drawing, dense] = draw(Math.max(root.clientWidth - 26, 240), found);
        stage.replaceChildren(drawing);
        const [good, text] = words(found);
        const here = found.from;
        const gap = floats.ulp(here, FORMATS[format.value]);
        return [
          h(
            "p",
            { class: "legend" },
            h("span", { class: "first" }, dense ? "more numbers than can be drawn" : "numbers of the format"),
            h("span", { class: "ink" }, "the weight"),
            h("span", { class: "second" }, "the update, and where it is rounded to"),
          ),
          h(
            "p",
            {},
            population(),
            `One ulp of ${format.value} at ${show(here)} is ${brief(gap)}.`,
          ),
          verdict(good, text),
        ];
      },
    );
    home(aim);
    update();
    followWidth(root, update);
  }

  calculators.start({ line });
})();
