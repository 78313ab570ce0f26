/* Floats of 8 to 32 bits, in the double precision of a browser, with the bits of the library.

A number is a double that the format holds. Sums and products of such numbers, rounded to double
and then to 8 or 11 bits, are rounded as if once, since 53 bits are more than twice as many and
two. Patterns and arithmetic are those of the formats of 16 bits. Where the library computes in float32 and that can be seen, `Math.fround` does the same. */

"use strict";

const floats = (() => {
  const FORMATS = {
    bf16: { name: "bf16", width: 16, precision: 8, least: -126, most: 127 },
    fp16: { name: "fp16", width: 16, precision: 11, least: -14, most: 15 },
    tf32: { name: "tf32", width: 19, precision: 11, least: -126, most: 127 },
    fp32: { name: "fp32", width: 32, precision: 24, least: -126, most: 127 },
    bf16i8: { name: "bf16i8", width: 24, precision: 16, least: -126, most: 127 },
    e4m3: { name: "e4m3", width: 8, precision: 4, least: -6, most: 8, max: 448 },
    e5m2: { name: "e5m2", width: 8, precision: 3, least: -14, most: 15 },
  };
  for (const format of Object.values(FORMATS)) {
    format.max ??= (2 - 2 ** (1 - format.precision)) * 2 ** format.most;
    format.tiny = 2 ** (format.least - format.precision + 1);
  }

  const view = new DataView(new ArrayBuffer(8));

  /* The e of 2^e <= |x| < 2^(e + 1), for doubles that are normal. */
  function exponent(x) {
    view.setFloat64(0, x);
    return ((view.getUint32(0) >>> 20) & 0x7ff) - 1023;
  }

  /* The distance between the numbers of a format around x. */
  const ulp = (x, format) =>
    2 ** (Math.max(x === 0 ? format.least : exponent(x), format.least) - format.precision + 1);

  /* To nearest, ties to even. */
  function round(x, format) {
    if (x === 0 || !Number.isFinite(x)) return x;
    const unit = ulp(x, format);
    const whole = Math.abs(x) / unit + 2 ** 52 - 2 ** 52; // a double from 2^52 on has no fraction
    const magnitude = whole * unit > format.max ? Infinity : whole * unit;
    return x < 0 ? -magnitude : magnitude;
  }

  // ------------------------------------------------------------------------------- patterns

  /* The number of 16 bits: a sign, the exponent, the fraction. */
  function fromBits(bits, format) {
    const fraction = format.precision - 1;
    const sign = bits & 0x8000 ? -1 : 1;
    const biased = (bits & 0x7fff) >> fraction;
    const rest = bits & ((1 << fraction) - 1);
    if (biased > 2 * format.most) return rest ? NaN : sign * Infinity;
    const hidden = biased ? 1 << fraction : 0;
    return sign * (hidden + rest) * 2 ** (Math.max(biased, 1) - format.most - fraction);
  }

  /* The 16 bits of a number; a NaN is the one that computing gives. */
  function toBits(x, format) {
    const fraction = format.precision - 1;
    const infinite = (2 * format.most + 1) << fraction;
    if (Number.isNaN(x)) return infinite | (1 << (fraction - 1));
    const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0;
    if (!Number.isFinite(x)) return sign | infinite;
    const significand = Math.abs(x) / ulp(x, format);
    const normal = significand >= 1 << fraction;
    const biased = normal ? exponent(x) + format.most : 0;
    return sign | (biased << fraction) | (normal ? significand - (1 << fraction) : significand);
  }

  /* The numbers next to x, below and above. */
  function neighbours(x, format) {
    const gap = ulp(x, format);
    const power = Math.abs(x) === 2 ** exponent(x) && exponent(x) > format.least;
    const inner = power ? gap / 2 : gap;
    const found = x > 0 ? [x - inner, x + gap] : x < 0 ? [x - gap, x + inner] : [x - gap, x + gap];
    return found.map((y) => round(y, format));
  }

  // ------------------------------------------------------------------- error-free transformations

  function twoSum(a, b, format) {
    const s = round(a + b, format);
    const bb = round(s - a, format);
    const aa = round(s - bb, format);
    const da = round(a - aa, format);
    const db = round(b - bb, format);
    return { s, bb, aa, da, db, e: round(da + db, format) };
  }

  function fastTwoSum(a, b, format) {
    const s = round(a + b, format);
    const z = round(s - a, format);
    return { s, z, e: round(b - z, format) };
  }

  /* The product in float32, which holds it unless it underflows. */
  function twoProd(a, b, format) {
    const product = Math.fround(a * b);
    const p = round(product, format);
    return { product, p, e: round(product - p, format) };
  }

  /* a + b, whose last bit is odd where that is not exact: what can be rounded once more. */
  function addOdd(a, b) {
    const s = a + b;
    const bb = s - a;
    const error = a - (s - bb) + (b - bb);
    if (!error || !Number.isFinite(error)) return s;
    view.setFloat64(0, s);
    const bits = view.getBigInt64(0);
    if (bits & 1n) return s;
    view.setBigInt64(0, error > 0 === s > 0 ? bits + 1n : bits - 1n);
    return view.getFloat64(0);
  }

  const fma = (a, b, c, format) => round(addOdd(Math.fround(a * b), c), format);

  // -------------------------------------------------------------------------------- expansions

  /* The sum of values as n normalized terms; `note(text, i, j, x)` is told of each step. */
  function renormalize(values, n, format, note = () => {}) {
    const x = [...values];
    const chain = (last, first) => {
      for (let i = last; i > first; i--) {
        const { s, e } = twoSum(x[i - 1], x[i], format);
        [x[i - 1], x[i]] = [s, e];
        note("two_sum", i - 1, i, x);
      }
    };
    let last = x.length - 1;
    for (let entered = 1; entered <= last; entered++) chain(entered, 0);
    for (let place = 0; place < Math.min(n + 1, last); place++) chain(last, place);
    last = Math.min(n, last);
    for (let place = 0; place < last; place++) chain(last, place);
    while (x.length < n + 1) x.push(0);
    const fast = (i, name) => {
      const { s, e } = fastTwoSum(x[i], x[i + 1], format);
      [x[i], x[i + 1]] = [s, e];
      note(name, i, i + 1, x);
    };
    for (let i = 0; i < n - 1; i++) {
      const [a, b, c] = x.slice(i, i + 3);
      const { s, e } = twoSum(a, round(b + b, format), format);
      if (e === 0 && b !== 0 && Math.sign(b) === Math.sign(c) && Number.isFinite(s)) {
        [x[i], x[i + 1]] = [s, -b];
        note("tie", i, i + 1, x);
      }
      for (let j = i + 1; j < n; j++) fast(j, "fast_two_sum");
    }
    x.length = n;
    fast(n - 2, "last");
    const plain = values.reduce((sum, value) => round(sum + value, format));
    return settle(x, plain);
  }

  function settle([leading, ...tails], plain) {
    const finite = [leading, ...tails].every(Number.isFinite);
    const kept = finite && !(leading === 0 && plain === 0) ? leading : plain;
    return [kept, ...tails.map((tail) => (finite ? tail : 0))];
  }

  /* A double as n normalized terms; two are taken from a float32. */
  function split(x, n, format) {
    const wide = n === 2 ? Math.fround : (y) => y;
    const rounded = [];
    for (let rest = x, i = 0; i < n; i++) {
      rounded.push(round(rest, format));
      rest -= rounded[i];
    }
    let rest = rounded.reduceRight((sum, term) => wide(term + sum));
    return rounded.map(() => {
      const term = round(rest, format);
      rest -= term;
      return term;
    });
  }

  /* An expansion of two or three terms, and a number: one rounding. */
  function grow([leading, ...tails], a, format) {
    const wide = tails.length === 1 ? Math.fround : (y) => y;
    const tail = tails.reduceRight((sum, term) => wide(term + sum));
    const first = wide(leading + a);
    return split(tail === 0 ? first : wide(first + tail), tails.length + 1, format);
  }

  /* A weight under `steps` updates of the same size, as bf16, bf16x2, ...; its value after each. */
  function walk(weight, update, steps, kind) {
    const [name, terms] = kind.split("x");
    const format = FORMATS[name];
    const single = Math.fround(update);
    const u = terms ? single : round(single, format); // torch gives both operands one type
    let x = terms ? split(weight, Number(terms), format) : [round(weight, format)];
    const path = [x];
    for (let step = 0; step < steps; step++) {
      x = terms ? grow(x, -u, format) : [round(x[0] - u, format)];
      path.push(x);
    }
    return path;
  }

  // ------------------------------------------------------------------------------- number lines

  /* The numbers of `terms` terms next to a double: the last at or below it, the first at or above
  it, and the nearest one. */
  function around(x, format, terms) {
    let sum = 0;
    let rest = x;
    for (let i = 1; i < terms; i++) {
      const term = round(rest, format);
      if (!Number.isFinite(term)) return [term, term, term];
      sum += term;
      rest -= term;
    }
    const gap = ulp(rest, format);
    const held = (y) => (Math.abs(y) > format.max ? Math.sign(y) * Infinity : y);
    const below = Math.min(Math.floor(rest / gap) * gap, format.max);
    const above = Math.max(Math.ceil(rest / gap) * gap, -format.max);
    return [sum + held(below), sum + held(above), sum + round(rest, format)];
  }

  /* The place of a double among the numbers of a format, zero having 0: a fraction between two. */
  function index(x, format) {
    if (x === 0) return 0;
    const e = Math.max(exponent(x), format.least);
    const whole = 2 ** (format.precision - 1);
    const place = (e - format.least) * whole + Math.abs(x) / ulp(x, format);
    return x < 0 ? -place : place;
  }

  // ---------------------------------------------------------------------------- exact values

  /* A double as m * 2^k, with m an integer. */
  function dyadic(x) {
    if (x === 0) return [0n, 0];
    const k = exponent(x) < -1022 ? -1074 : exponent(x) - 52;
    return [BigInt(Math.abs(x) / 2 ** k) * (x < 0 ? -1n : 1n), k];
  }

  function plus([m, k], [n, l]) {
    const least = Math.min(k, l);
    return [(m << BigInt(k - least)) + (n << BigInt(l - least)), least];
  }

  const times = ([m, k], [n, l]) => [m * n, k + l];

  /* The powers of two that are in a magnitude: that of its first bit, and its bits from there. */
  function digits([m, k]) {
    const all = (m < 0n ? -m : m).toString(2);
    const bits = all.replace(/0+$/, "") || "0";
    return { negative: m < 0n, high: k + all.length - 1, bits };
  }

  const equal = (p, q) => plus(p, times(q, [-1n, 0]))[0] === 0n;

  return {
    FORMATS,
    round,
    ulp,
    fromBits,
    toBits,
    neighbours,
    twoSum,
    fastTwoSum,
    twoProd,
    fma,
    renormalize,
    split,
    grow,
    walk,
    around,
    index,
    dyadic,
    plus,
    times,
    digits,
    equal,
  };
})();

if (typeof module === "object") module.exports = floats;
