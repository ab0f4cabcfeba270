"""Triton kernels of a decoding step: attention over pages, and drawing tokens.

The key-value cache is reached through a table of addresses, not as an argument: a CUDA graph keeps working when the
cache is given back for the update and allocated anew elsewhere.

Shapes: B lanes, H query heads in groups of GROUP that share one of the key heads, D head size. A lane's t-th key lies
in slot `table[lane, t // PAGE] * PAGE + t % PAGE` of a cache [slots, key heads, D].
"""

# Triton reads the bodies of its functions: annotations other than constexpr mean nothing to it.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit
def attend(
    query_ptr, key_ptr, value_ptr, bases_ptr, table_ptr, lengths_ptr, out_ptr, partial_ptr, mass_ptr,
    query_lane, query_head, key_lane, key_head, value_lane, value_head, table_width, scale, chunk, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of one lane's query group over one chunk of its keys. Grid: (key heads, lanes, chunks).

    The program whose chunk has the newest key also writes that key and its value behind the others. With SPLIT, each
    program leaves its chunk's weighted mean and the log of its mass for `combine`; else the result.
    """
    head, lane, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    newest = tl.load(lengths_ptr + lane) - 1
    first = tl.maximum(newest + 1 - window, 0)
    begin = tl.maximum(split * chunk, first // BLOCK * BLOCK)
    end = tl.minimum(split * chunk + chunk, newest)
    has_newest = (newest >= split * chunk) & (newest < split * chunk + chunk)
    members, dims, columns = tl.arange(0, GROUP_PADDED), tl.arange(0, D_PADDED), tl.arange(0, BLOCK)
    real = members < GROUP
    heads = head * GROUP + members
    cell = (lane * HEADS * GROUP + heads) * tl.num_programs(2) + split
    if (begin >= end) & (has_newest == 0):  # an empty chunk: no mass, and `combine` reads no mean of it
        tl.store(mass_ptr + cell, tl.full([GROUP_PADDED], float("-inf"), tl.float32), mask=real)
        return
    wide = real[:, None] & (dims < D)[None, :]
    query = tl.load(query_ptr + lane * query_lane + heads[:, None] * query_head + dims[None, :], mask=wide, other=0.0)
    element = tl.pointer_type(query_ptr.dtype.element_ty)
    keys, values = tl.load(bases_ptr).to(element), tl.load(bases_ptr + 1).to(element)
    best = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP_PADDED], tl.float32)
    mean = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32)
    scale2 = scale * 1.4426950408889634  # exp2 is one instruction
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        page = tl.load(table_ptr + lane * table_width + start // PAGE).to(tl.int64)
        slots = page * PAGE + start % PAGE + columns
        # The cache comes in whole pages of finite numbers: what lies behind the last key is read, and weighs nothing.
        tile = (slots[:, None] * HEADS + head) * D + dims[None, :]
        key_tile, value_tile = keys + tile, values + tile
        if D % 16 == 0:  # else unknown to the compiler, since the addresses come from memory: loads of 16 bytes
            key_tile = tl.max_contiguous(tl.multiple_of(key_tile, [16, 16]), [1, D_PADDED])
            value_tile = tl.max_contiguous(tl.multiple_of(value_tile, [16, 16]), [1, D_PADDED])
        if D == D_PADDED:
            key, value = tl.load(key_tile), tl.load(value_tile)
        else:
            key = tl.load(key_tile, mask=(dims < D)[None, :], other=0.0)
            value = tl.load(value_tile, mask=(dims < D)[None, :], other=0.0)
        at = start + columns
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale2
        scores = tl.where(((at < end) & (at >= first))[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A block may lie wholly before the window: then nothing is seen yet and the maximum is still -inf.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - floor)
        weights = tl.exp2(scores - floor[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        mean = mean * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        best = higher
    if has_newest:  # not read from the cache, which it enters only now
        key = tl.load(key_ptr + lane * key_lane + head * key_head + dims, mask=dims < D, other=0.0)
        value = tl.load(value_ptr + lane * value_lane + head * value_head + dims, mask=dims < D, other=0.0)
        page = tl.load(table_ptr + lane * table_width + newest // PAGE).to(tl.int64)
        slot = ((page * PAGE + newest % PAGE) * HEADS + head) * D
        tl.store(keys + slot + dims, key, mask=dims < D)
        tl.store(values + slot + dims, value, mask=dims < D)
        score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale2
        higher = tl.maximum(best, score)
        shrink, weight = tl.exp2(best - higher), tl.exp2(score - higher)
        mass = mass * shrink + weight
        mean = mean * shrink[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
        best = higher
    mean = mean / mass[:, None]
    if SPLIT:
        tl.store(mass_ptr + cell, best + tl.log2(mass), mask=real)
        tl.store(partial_ptr + cell[:, None] * D + dims[None, :], mean, mask=wide)
    else:
        offset = (lane * HEADS * GROUP + heads)[:, None] * D + dims[None, :]
        tl.store(out_ptr + offset, mean.to(out_ptr.dtype.element_ty), mask=wide)


@triton.jit
def combine(
    partial_ptr, mass_ptr, out_ptr, splits,
    D: tl.constexpr, D_PADDED: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """The mean over all chunks of one head of one lane. Grid: (lanes · query heads,)."""
    row = tl.program_id(0)
    parts, dims = tl.arange(0, SPLITS_PADDED), tl.arange(0, D_PADDED)
    mass = tl.load(mass_ptr + row * splits + parts, mask=parts < splits, other=float("-inf"))
    weights = tl.exp2(mass - tl.max(mass, 0))
    weights = weights / tl.sum(weights, 0)
    used = (mass > float("-inf"))[:, None] & (dims < D)[None, :]
    partial = tl.load(partial_ptr + (row * splits + parts)[:, None] * D + dims[None, :], mask=used, other=0.0)
    mean = tl.sum(partial * weights[:, None], 0)
    tl.store(out_ptr + row * D + dims, mean.to(out_ptr.dtype.element_ty), mask=dims < D)


@triton.jit
def measure(logits_ptr, best_ptr, where_ptr, mass_ptr, heat_ptr, vocabulary, warmth, BLOCK: tl.constexpr):
    """Maximum, its position, Σ exp and Σ x·exp of one block of a lane's scaled logits. Grid: (blocks, lanes)."""
    block, lane = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    row = lane.to(tl.int64) * vocabulary
    x = tl.load(logits_ptr + row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32) * warmth
    best = tl.max(x, 0)
    floor = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp(x - floor)
    cell = lane * tl.num_programs(0) + block
    tl.store(best_ptr + cell, best)
    tl.store(where_ptr + cell, block * BLOCK + tl.argmax(x, 0))
    tl.store(mass_ptr + cell, tl.sum(weights, 0))
    tl.store(heat_ptr + cell, tl.sum(weights * tl.where(weights > 0, x - floor, 0.0), 0))


@triton.jit
def draw(
    logits_ptr, best_ptr, where_ptr, mass_ptr, heat_ptr, uniforms_ptr, step_ptr,
    token_ptr, position_ptr, length_ptr, tokens_ptr, logprobs_ptr, entropies_ptr,
    vocabulary, warmth, blocks, steps, last_position,
    BLOCK: tl.constexpr, BLOCKS_PADDED: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Draw a lane's token by inverting its distribution function, note it, and move the lane on. Grid: (lanes,)."""
    lane = tl.program_id(0)
    step = tl.load(step_ptr)
    parts = tl.arange(0, BLOCKS_PADDED)
    cell = lane * blocks + parts
    known = parts < blocks
    bests = tl.load(best_ptr + cell, mask=known, other=float("-inf"))
    best = tl.max(bests, 0)
    scales = tl.exp(bests - best)
    masses = tl.load(mass_ptr + cell, mask=known, other=0.0) * scales
    heats = tl.load(heat_ptr + cell, mask=known, other=0.0) * scales
    total = tl.sum(masses, 0)
    # H = log Z - E[x], both measured from the maximum; a block of nothing but -inf has no share in either.
    lifted = heats + masses * tl.where(masses > 0, bests - best, 0.0)
    entropy = tl.log(total) - tl.sum(lifted, 0) / total
    if GREEDY:
        token = tl.load(where_ptr + lane * blocks + tl.argmax(bests, 0))
    else:
        sums = tl.cumsum(masses.to(tl.float64), 0)
        whole = tl.sum(tl.where(parts == blocks - 1, sums, 0.0), 0)
        target = tl.load(uniforms_ptr + lane * steps + step) * whole
        target = tl.minimum(target, whole * (1.0 - 2.0**-53))
        passed = (sums <= target) & known
        block = tl.minimum(tl.sum(passed.to(tl.int32), 0), blocks - 1)
        before = tl.sum(tl.where(parts == block - 1, sums, 0.0), 0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        row = lane.to(tl.int64) * vocabulary
        x = tl.load(logits_ptr + row + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32) * warmth
        share = tl.exp(x - best).to(tl.float64)
        inside = tl.cumsum(share, 0)
        # Rounding may leave the target just behind the block's last token of any mass: then that token is meant.
        last = tl.max(tl.where(share > 0, ids, 0), 0)
        token = tl.minimum(block * BLOCK + tl.sum((inside <= target - before).to(tl.int32), 0), last)
    chosen = tl.load(logits_ptr + lane.to(tl.int64) * vocabulary + token).to(tl.float32) * warmth
    tl.store(tokens_ptr + lane * steps + step, token)
    tl.store(logprobs_ptr + lane * steps + step, chosen - best - tl.log(total))
    tl.store(entropies_ptr + lane * steps + step, entropy)
    tl.store(token_ptr + lane, token.to(tl.int64))
    tl.store(position_ptr + lane, tl.minimum(tl.load(position_ptr + lane) + 1, last_position))
    tl.store(length_ptr + lane, tl.load(length_ptr + lane) + 1)
