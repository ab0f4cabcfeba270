// What an answer kept and what it changed of the attempt it was shown, word by word.

import { h } from "./dom.js";

const MOST = 1200;

export function wordsOf(text) {
  return text.match(/\s+|[A-Za-zÀ-ɏ]+|\d+|[^\sA-Za-zÀ-ɏ\d]/gu) || [];
}

// [["same" | "gone" | "new", text]]: the longest common subsequence, after equal ends are cut off.
export function difference(before, after) {
  const [a, b] = [wordsOf(before), wordsOf(after)];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const middle = compared(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([["same", a.slice(0, start).join("")], ...middle, ["same", a.slice(a.length - end).join("")]]);
}

function compared(a, b) {
  if (a.length > MOST || b.length > MOST)
    return [
      ["gone", a.join("")],
      ["new", b.join("")],
    ];
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      found.push(["same", a[i]]);
      i += 1;
      j += 1;
    } else if (i < a.length && (j === b.length || longest[i + 1][j] >= longest[i][j + 1])) {
      found.push(["gone", a[i]]);
      i += 1;
    } else {
      found.push(["new", b[j]]);
      j += 1;
    }
  }
  return found;
}

function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (found.length && found[found.length - 1][0] === kind) found[found.length - 1][1] += text;
    else found.push([kind, text]);
  }
  return found;
}

export const diffView = (before, after) =>
  h(
    "div.diff",
    {},
    difference(before, after).map(([kind, text]) => h({ same: "span", gone: "del", new: "ins" }[kind], {}, text)),
  );
