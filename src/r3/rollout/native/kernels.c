/* The small operations of a decoding step on a CPU, one pass over memory each; the products stay with oneDNN.

   Compiled by cpu.py on the machine that runs it, and called from there. Every row is computed by one
   thread in a fixed order, so that a response depends neither on the number of threads nor on its neighbours.

   Tensors are float32, or bfloat16 if BFLOAT16 is defined; arithmetic is in float32 either way. Bfloat16 results are
   rounded wherever the model's own code rounds them, so that log-probs stay close to those of the trainer's forward.

   Pages: keys are [page, head, dimension, token], so that the scores of 16 tokens are one vector, in bfloat16
   [page, head, dimension / 2, token, 2]; values are [page, head, token, dimension]. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define LANES 16 /* floats of a vector, and tokens of a page where the fast form applies */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

typedef union { uint32_t bits; float value; } word;

#ifdef BFLOAT16
typedef uint16_t number;
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
enum { PAIR = 2 }; /* numbers that are read as one word: its lower half is the first of them */

INLINE float widen(number x) {
    word w = {.bits = (uint32_t)x << 16};
    return w.value;
}

/* To the nearest, ties to even. */
INLINE number narrow(float x) {
    word w = {.value = x};
    uint32_t upper = (w.bits + 0x7fff + (w.bits >> 16 & 1)) >> 16;
    return x == x ? upper : 0x7fc0; /* a NaN stays one */
}

/* Two dimensions' part in the scores of 16 tokens. */
INLINE vec add_scores(vec sums, const number *query, const number *keys) {
    words both = *(const words *)keys;
#ifdef __AVX512BF16__
    uint32_t pair = query[0] | (uint32_t)query[1] << 16;
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)both);
#else
    return sums + widen(query[0]) * (vec)(both << 16) + widen(query[1]) * (vec)(both & 0xffff0000u);
#endif
}

/* A token's weighted values added to 32 sums: those of even dimensions first, then those of odd ones. */
INLINE void add_values(vec *sums, float weight, const number *values) {
    words both = *(const words *)values;
    sums[0] += weight * (vec)(both << 16);
    sums[1] += weight * (vec)(both & 0xffff0000u);
}

/* Such sums as numbers, in order. */
INLINE void write_sums(const float *sums, number *out) {
    for (int64_t i = 0; i < LANES; i++) {
        uint32_t both = narrow(sums[i]) | (uint32_t)narrow(sums[i + LANES]) << 16;
        memcpy(out + PAIR * i, &both, sizeof both);
    }
}
#else
typedef float number;
enum { PAIR = 1 };

INLINE float widen(number x) { return x; }
INLINE number narrow(float x) { return x; }
INLINE vec add_scores(vec sums, const number *query, const number *keys) { return sums + *query * *(const vec *)keys; }
INLINE void add_values(vec *sums, float weight, const number *values) { *sums += weight * *(const vec *)values; }
INLINE void write_sums(const float *sums, number *out) { *(vec *)out = *(const vec *)sums; }
#endif

/* What is left of a number where it is written to a tensor. */
INLINE float rounded(float x) { return widen(narrow(x)); }

enum { WORTH = 1 << 17 }; /* numbers that a thread must have to do: waking it takes as long as some ten thousand */

/* Threads for so many numbers. */
static int share(int64_t numbers, int most) {
    int64_t threads = numbers / WORTH;
    return threads < 1 ? 1 : threads < most ? (int)threads : most;
}

/* e^x with an error of about one unit in the last place; 0 below -87.3, and NaN for NaN. */
INLINE float exponential(float x) {
    float bounded = x > 88.0f ? 88.0f : x;
    float power = rintf(bounded * 1.44269504088896341f);
    float rest = fmaf(power, -0.693359375f, bounded);
    rest = fmaf(power, 2.12194440e-4f, rest);
    float sum = 1.9875691500e-4f;
    sum = fmaf(sum, rest, 1.3981999507e-3f);
    sum = fmaf(sum, rest, 8.3334519073e-3f);
    sum = fmaf(sum, rest, 4.1665795894e-2f);
    sum = fmaf(sum, rest, 1.6666665459e-1f);
    sum = fmaf(sum, rest, 5.0000001201e-1f);
    sum = fmaf(sum, rest * rest, rest) + 1.0f;
    word scale = {.bits = (uint32_t)((int32_t)power + 127) << 23};
    return x < -87.3f ? 0.0f : sum * scale.value;
}

/* What attention is told about the cache and the step. */
typedef struct {
    number *keys, *values;       /* of this layer */
    const int32_t *table;        /* [lanes, table_width] */
    const int32_t *length;       /* [lanes], the newest token included */
    const number *cosine, *sine; /* [lanes, size] rotary embedding, or NULL where it was applied before */
    int64_t lanes, table_width, heads, group, size, page, window; /* window 0: all tokens */
    float scale;
} Attention;

/* A head's vector of the newest token under the rotary embedding. */
static void rotate(const number *x, const number *cosine, const number *sine, int64_t size, number *out) {
    if (!cosine) {
        memcpy(out, x, size * sizeof(number));
        return;
    }
    int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float a = widen(x[i]), b = widen(x[i + half]);
        out[i] = narrow(rounded(a * widen(cosine[i])) + rounded(-b * widen(sine[i])));
        out[i + half] = narrow(rounded(b * widen(cosine[i + half])) + rounded(a * widen(sine[i + half])));
    }
}

/* Where in a page a dimension of a token's key is. */
INLINE int64_t key_at(int64_t i, int64_t token, int64_t page) {
    return (i / PAIR * page + token) * PAIR + i % PAIR;
}

static void put(number *keys, number *values, const number *key, const number *value, int64_t slot, int64_t head,
                int64_t heads, int64_t size, int64_t page) {
    int64_t at = ((slot / page) * heads + head) * page * size, token = slot % page;
    for (int64_t i = 0; i < size; i++) keys[at + key_at(i, token, page)] = key[i];
    memcpy(values + at + token * size, value, size * sizeof(number));
}

/* Scores of the tokens of `count` pages, and then their weighted values added to `out`: for any page and size. */
INLINE void scores_any(const number *query, number *const *keys, int64_t count, int64_t size, int64_t page,
                       float *scores) {
    for (int64_t p = 0; p < count; p++)
        for (int64_t t = 0; t < page; t++) {
            float sum = 0;
            for (int64_t i = 0; i < size; i++) sum += widen(query[i]) * widen(keys[p][key_at(i, t, page)]);
            scores[p * page + t] = sum;
        }
}

INLINE void add_any(const float *weights, number *const *values, int64_t first, int64_t last, int64_t size,
                    int64_t page, float *out) {
    for (int64_t t = first; t < last; t++) {
        const number *value = values[t / page] + (t % page) * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) out[i] += weights[t] * widen(value[i]);
    }
}

/* The same for pages of 16 tokens and heads of a multiple of 16: four pages at a time, sums in registers. */
INLINE void scores_fast(const number *query, number *const *keys, int64_t size, float *scores) {
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (int64_t i = 0; i < size; i += PAIR) {
        a = add_scores(a, query + i, keys[0] + i * LANES);
        b = add_scores(b, query + i, keys[1] + i * LANES);
        c = add_scores(c, query + i, keys[2] + i * LANES);
        d = add_scores(d, query + i, keys[3] + i * LANES);
    }
    *(vec *)scores = a, *(vec *)(scores + 16) = b, *(vec *)(scores + 32) = c, *(vec *)(scores + 48) = d;
}

INLINE void add_fast(const float *weights, number *const *values, int64_t first, int64_t last, int64_t size,
                     float *out) {
    vec sums[16];
    for (int64_t i = 0; i < size / LANES; i++) sums[i] = *(vec *)(out + i * LANES);
    for (int64_t t = first; t < last; t++) {
        const number *value = values[t / LANES] + (t % LANES) * size;
#pragma GCC unroll 16
        for (int64_t i = 0; i < size / LANES; i += PAIR) add_values(sums + i, weights[t], value + i * LANES);
    }
    for (int64_t i = 0; i < size / LANES; i++) *(vec *)(out + i * LANES) = sums[i];
}

enum { TILE = 64, LARGEST = 512 }; /* tokens looked at together; most dimensions of a head */

/* One query over its tokens, tile by tile, with the softmax kept up to date. */
INLINE void attend_query(const Attention *a, const number *query, int64_t lane, int64_t head, int64_t size,
                         int64_t page, int fast, number *to) {
    int64_t length = a->length[lane], pages = (length + page - 1) / page, together = fast ? 4 : TILE / page;
    int64_t start = a->window && a->window < length ? length - a->window : 0;
    const int32_t *table = a->table + lane * a->table_width;
    if (together < 1) together = 1;
    float best = -INFINITY, total = 0, scores[TILE > LARGEST ? TILE : LARGEST], out[LARGEST];
    memset(out, 0, size * sizeof(float));
    for (int64_t page0 = start / page; page0 < pages; page0 += together) {
        int64_t count = pages - page0 < together ? pages - page0 : together;
        int64_t first = start > page0 * page ? start - page0 * page : 0;
        int64_t last = length - page0 * page < count * page ? length - page0 * page : count * page;
        number *keys[TILE], *values[TILE];
        for (int64_t p = 0; p < together; p++) { /* beyond the last page, that one again: read, not used */
            int64_t at = (table[page0 + (p < count ? p : count - 1)] * a->heads + head) * page * size;
            keys[p] = a->keys + at, values[p] = a->values + at;
        }
        if (fast) scores_fast(query, keys, size, scores);
        else scores_any(query, keys, count, size, page, scores);
        float highest = best;
#pragma omp simd reduction(max : highest)
        for (int64_t t = first; t < last; t++) highest = scores[t] * a->scale > highest ? scores[t] * a->scale : highest;
        float sum = 0, keep = best == highest ? 1.0f : exponential(best - highest);
#pragma omp simd reduction(+ : sum)
        for (int64_t t = first; t < last; t++) {
            scores[t] = exponential(scores[t] * a->scale - highest);
            sum += scores[t];
        }
        if (keep != 1.0f)
            for (int64_t i = 0; i < size; i++) out[i] *= keep;
        if (fast) add_fast(scores, values, first, last, size, out);
        else add_any(scores, values, first, last, size, page, out);
        total = total * keep + sum, best = highest;
    }
    for (int64_t i = 0; i < size; i++) out[i] /= total;
    if (fast)
        for (int64_t i = 0; i < size; i += PAIR * LANES) write_sums(out + i, to + i);
    else
        for (int64_t i = 0; i < size; i++) to[i] = narrow(out[i]);
}

/* Store each lane's newest key and value and attend over all of its tokens.
   query [lanes, heads · group, size], key and value [lanes, heads, size], each with strides of its own, in numbers. */
void attend(const Attention *a, const number *query, int64_t query_lane, int64_t query_head, const number *key,
            int64_t key_lane, int64_t key_head, const number *value, int64_t value_lane, int64_t value_head,
            number *out, int threads) {
    int64_t tokens = 0;
    for (int64_t lane = 0; lane < a->lanes; lane++) tokens += a->length[lane];
    threads = share(tokens * a->heads * (a->group + 1) * a->size, threads);
#pragma omp parallel for schedule(dynamic, 8) num_threads(threads)
    for (int64_t work = 0; work < a->lanes * a->heads; work++) {
        int64_t lane = work / a->heads, head = work % a->heads, size = a->size, newest = a->length[lane] - 1;
        const number *cosine = a->cosine ? a->cosine + lane * size : 0, *sine = a->sine ? a->sine + lane * size : 0;
        number turned[LARGEST];
        rotate(key + lane * key_lane + head * key_head, cosine, sine, size, turned);
        int64_t slot = a->table[lane * a->table_width + newest / a->page] * a->page + newest % a->page;
        put(a->keys, a->values, turned, value + lane * value_lane + head * value_head, slot, head, a->heads, size,
            a->page);
        for (int64_t g = head * a->group; g < (head + 1) * a->group; g++) {
            number *to = out + (lane * a->heads * a->group + g) * size;
            rotate(query + lane * query_lane + g * query_head, cosine, sine, size, turned);
            if (a->page == LANES && size == 32) attend_query(a, turned, lane, head, 32, LANES, 1, to);
            else if (a->page == LANES && size == 64) attend_query(a, turned, lane, head, 64, LANES, 1, to);
            else if (a->page == LANES && size == 128) attend_query(a, turned, lane, head, 128, LANES, 1, to);
            else attend_query(a, turned, lane, head, size, a->page, 0, to);
        }
    }
}

/* Keys and values of a prefill, [tokens, heads, size], into their slots. */
void store(number *keys, number *values, const number *key, int64_t key_token, int64_t key_head, const number *value,
           int64_t value_token, int64_t value_head, const int64_t *slots, int64_t tokens, int64_t heads, int64_t size,
           int64_t page, int threads) {
    threads = share(tokens * heads * size, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            put(keys, values, key + t * key_token + h * key_head, value + t * value_token + h * value_head, slots[t], h,
                heads, size, page);
}

/* out = weight · x / rms(x), row by row; where `added` is given, x += added comes first. `out` may be `x`. */
void normalise(number *x, const number *added, const number *weight, float eps, number *out, int64_t rows,
               int64_t size, int threads) {
    threads = share(rows * size, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        number *row = x + r * size, *to = out + r * size;
        float sum = 0;
        if (added) {
#pragma omp simd
            for (int64_t i = 0; i < size; i++) row[i] = narrow(widen(row[i]) + widen(added[r * size + i]));
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; i++) sum += widen(row[i]) * widen(row[i]);
        float factor = 1.0f / sqrtf(sum / size + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = narrow(widen(weight[i]) * rounded(widen(row[i]) * factor));
    }
}

/* gate = silu(gate) · up */
void gate_mlp(number *gate, const number *up, int64_t rows, int64_t size, int threads) {
    threads = share(rows * size, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        number *row = gate + r * size;
        const number *other = up + r * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float x = widen(row[i]);
            row[i] = narrow(rounded(x / (1.0f + exponential(-x))) * widen(other[i]));
        }
    }
}

/* What the draw writes, by lane, and the step it writes at. */
typedef struct {
    const double *uniforms; /* [lanes, steps] */
    int64_t *token, *position;
    int32_t *length, *tokens; /* tokens, logprobs, entropies: [lanes, steps] */
    float *logprobs, *entropies;
    int64_t step, steps, last_position;
} Draws;

enum { BLOCK = 256, MOST_BLOCKS = 4096 };

INLINE float below(number logit, float temperature, float best) {
    return temperature == 1.0f ? widen(logit) - best : widen(logit) / temperature - best;
}

/* Draw one token per lane by inverting the distribution function, as r3.rollout.sampling says it. */
void draw(const Draws *d, const number *logits, int64_t lanes, int64_t row, int64_t vocabulary, float temperature,
          int greedy, int threads) {
    threads = share(lanes * vocabulary, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t lane = 0; lane < lanes; lane++) {
        const number *x = logits + lane * row;
        float best = -INFINITY;
#pragma omp simd reduction(max : best)
        for (int64_t i = 0; i < vocabulary; i++) best = widen(x[i]) > best ? widen(x[i]) : best;
        float top = temperature == 1.0f ? best : best / temperature;
        int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK, token = vocabulary - 1;
        float by_block[MOST_BLOCKS];
        double total = 0, moment = 0;
        for (int64_t b = 0; b < blocks; b++) {
            int64_t end = (b + 1) * BLOCK < vocabulary ? (b + 1) * BLOCK : vocabulary;
            float sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
            for (int64_t i = b * BLOCK; i < end; i++) {
                float under = below(x[i], temperature, top), weight = exponential(under);
                sum += weight;
                weighted += weight * (under < -200.0f ? -200.0f : under);
            }
            by_block[b] = sum, total += sum, moment += weighted;
        }
        if (greedy) {
            for (int64_t i = vocabulary - 1; i >= 0; i--) token = widen(x[i]) == best ? i : token;
        } else {
            double target = d->uniforms[lane * d->steps + d->step] * total, start = 0;
            target = target < nextafter(total, 0) ? target : nextafter(total, 0);
            int64_t block = 0;
            while (block < blocks - 1 && !(start + by_block[block] > target)) start += by_block[block++];
            int64_t begin = block * BLOCK, end = begin + BLOCK < vocabulary ? begin + BLOCK : vocabulary;
            double inside = 0, reached = 0;
            for (int64_t i = begin; i < end; i++) inside += exponential(below(x[i], temperature, top));
            target = (target - start) / by_block[block] * inside;
            target = target < nextafter(inside, 0) ? target : nextafter(inside, 0);
            for (token = begin; token < end - 1; token++) {
                reached += exponential(below(x[token], temperature, top));
                if (reached > target) break;
            }
        }
        int64_t at = lane * d->steps + d->step;
        double entropy = log(total) - moment / total;
        d->tokens[at] = token, d->token[lane] = token;
        d->logprobs[at] = below(x[token], temperature, top) - log(total);
        d->entropies[at] = entropy < 0 ? 0 : entropy;
        d->position[lane] = d->position[lane] < d->last_position ? d->position[lane] + 1 : d->last_position;
        d->length[lane]++;
    }
}
