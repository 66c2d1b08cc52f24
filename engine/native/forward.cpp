// The decoder's forward pass on a CPU: one call a step, all layers, on the caller's threads.
//
// Every thread runs `loramux_forward` on the same `Step` and takes its share of each phase. Rows are
// computed alike whatever the batch: a row's bits do not depend on the rows beside it.
#include "simd.h"
#include "team.h"
#include "linear.h"
#include "adapters.h"
#include "attention.h"

#ifdef HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace loramux;

namespace {

struct Layer {
    const float* input_norm;  // [hidden]
    const float* mlp_norm;    // [hidden]
    const float* qk_norm;     // [heads + kv_heads, head_dim], or none
    Linear qkv, o, gate_up, down;  // gate_up: a panel of gate, a panel of up, and so on
};

struct Model {
    const Layer* layers;
    int64_t layer_count, hidden, inner, heads, kv_heads, head_dim, window;  // window 0: none
    float epsilon, scale;
    const float* cos;  // [context, head_dim]
    const float* sin;  // [context, head_dim], negated in the first half
    int64_t kv_fp32, block_bytes;
    uint8_t* arena;
};

struct Step {
    const Model* model;
    int64_t rows;
    float* hidden;            // [rows, hidden], in and out
    const int64_t* position;  // [rows]
    const int64_t* first_block;  // [rows] where the row's table begins
    const int32_t* tables;
    float* x;          // [rows, widest input]
    Number* inputs;    // the same as linears read it, rows padded to 32
    Number* gated;     // [rows padded to 32, inner]
    float* y;          // [rows, widest output]
    float* q;          // [rows, heads * head_dim]
    uint8_t* scratch;  // of each thread
    int64_t scratch_bytes;
    void (*adapters)(void*);       // none: no row uses an adapter
    AdapterCall* const* lora;      // [layers, 4]
    int64_t threads;
    std::atomic<int64_t> arrived;
    Phase* phases;
};

constexpr int64_t ROWS_AT_ONCE = 4;

// x / sqrt(mean(x^2) + epsilon) * weight, also where out is x.
template <typename... Out>
INLINE void normalize(const float* x, const float* weight, int64_t width, float epsilon, Out*... out) {
    f32x16 squares = {};
    for (int64_t i = 0; i < width; i += 16) squares += load(x + i) * load(x + i);
    float factor = 1.f / __builtin_sqrtf(sum(squares) / width + epsilon);
    for (int64_t i = 0; i < width; i += 16) {
        f32x16 v = load(x + i) * factor * load(weight + i);
        (store(out + i, v), ...);
    }
}

// Which two panels of a linear a thread multiplies, and where it will probably read next.
struct Turn {
    int64_t pair;
    const uint8_t* next;
};

// y for a pair of panels and all rows; `sink(row, columns)` gets 32 numbers of each row.
template <typename Sink>
INLINE void product(const Linear& linear, Turn turn, const Number* const* terms, int64_t term_count, int64_t rows,
                    uint8_t* scratch, Sink sink) {
    float* c = (float*)scratch;
    Number* room = (Number*)(scratch + TILE_ROWS * SUMS * 4);
    int64_t inputs = linear.inputs, panel_bytes = linear.panel(1) - linear.panel(0);
    bool both = 2 * turn.pair + 1 < linear.panels();
    const uint8_t* codes = linear.panel(2 * turn.pair);
    Pair pair = {{codes, both ? codes + panel_bytes : codes}, {turn.next, turn.next + panel_bytes},
                 inputs, linear.group_bytes()};
    bool widened = linear.kind == BF16 && FP32_TERMS == 2, again = term_count > 1 || rows > TILE_ROWS;
    Number* w0 = widened ? (Number*)pair.codes[0] : room;
    Number* w1 = widened ? (Number*)pair.codes[1] : room + inputs * PANEL;
    f32x16 bias0 = {}, bias1 = {};
    if (linear.bias) {
        bias0 = load(linear.bias + turn.pair * PAIR);
        if (both) bias1 = load(linear.bias + turn.pair * PAIR + PANEL);
    }
    for (int64_t first = 0; first < rows; first += TILE_ROWS) {
        int64_t count = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
        for (int64_t term = 0; term < term_count; term++) {
            const Number* x = terms[term] + first * inputs;
            if (widened) multiply(x, inputs, count, inputs, w0, w1, c, term > 0);
            else if (linear.kind == INT4) expand_and_multiply<INT4>(pair, x, inputs, count, w0, w1, again, c);
            else if (linear.kind == INT8 || FP32_TERMS == 2) expand_and_multiply<INT8>(pair, x, inputs, count, w0, w1, again, c);
            else expand_and_multiply<BF16>(pair, x, inputs, count, w0, w1, again, c);
            widened = true;
        }
        for (int64_t row = 0; row < count; row++)
            sink(first + row, sum_of(c, row, 0) + bias0, sum_of(c, row, 1) + bias1, both);
    }
}

INLINE int64_t pairs(const Linear& linear) { return (linear.panels() + 1) / 2; }

INLINE Turn turn(const Member& member, const Linear& linear, int64_t pair, int64_t next, const Linear& then) {
    if (next < 0) return {pair, then.panel(2 * member.first_of(pairs(then)))};
    return {pair, linear.panel(2 * next)};
}

template <typename E>
INLINE E* kv_row(const Model& m, int64_t layer, int64_t part) {
    return (E*)m.arena + (layer * 2 + part) * BLOCK * m.kv_heads * m.head_dim;
}

INLINE void rotate(const float* x, const float* cos, const float* sin, int64_t dim, float scale, float* out) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < dim; i++) {
        int64_t other = i < half ? i + half : i - half;
        out[i] = (x[i] * cos[i] + x[other] * sin[i]) * scale;
    }
}

template <typename E>
INLINE void write_row(E* to, const float* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(to + i, load(from + i));
}

// Rotates q into step.q, and k and v into the cache.
template <typename E>
INLINE void place(const Step& s, const Model& m, const Layer& layer, int64_t index, int64_t row) {
    int64_t dim = m.head_dim, width = m.kv_heads * dim, position = s.position[row];
    float* y = s.y + row * layer.qkv.outputs;
    const float *cos = m.cos + position * dim, *sin = m.sin + position * dim;
    if (layer.qk_norm)
        for (int64_t h = 0; h < m.heads + m.kv_heads; h++)
            normalize(y + h * dim, layer.qk_norm + h * dim, dim, m.epsilon, y + h * dim);
    for (int64_t h = 0; h < m.heads; h++)
        rotate(y + h * dim, cos, sin, dim, m.scale, s.q + (row * m.heads + h) * dim);
    int64_t block = s.tables[s.first_block[row] + position / BLOCK];
    int64_t at = block * (m.block_bytes / (int64_t)sizeof(E)) + position % BLOCK * width;
    float turned[256];
    for (int64_t h = 0; h < m.kv_heads; h++) {
        rotate(y + (m.heads + h) * dim, cos, sin, dim, 1.f, turned);
        write_row(kv_row<E>(m, index, 0) + at + h * dim, turned, dim);
    }
    write_row(kv_row<E>(m, index, 1) + at, y + (m.heads + m.kv_heads) * dim, width);
}

template <typename E>
INLINE void attend_row(const Step& s, const Model& m, int64_t index, int64_t unit, int64_t stride) {
    int64_t row = unit / m.kv_heads, head = unit % m.kv_heads, dim = m.head_dim;
    int64_t group = m.heads / m.kv_heads, position = s.position[row], width = m.kv_heads * dim;
    Context<E> context = {
        kv_row<E>(m, index, 0) + head * dim, kv_row<E>(m, index, 1) + head * dim,
        m.block_bytes / (int64_t)sizeof(E), width, s.tables + s.first_block[row],
        m.window && position + 1 > m.window ? position + 1 - m.window : 0, position};
    int64_t column = head * group * dim;
    float* out = s.x + row * stride + column;
    attend_any<E>(context, group, dim, s.q + row * m.heads * dim + column, out);
    write_row(s.inputs + row * stride + column, out, group * dim);
}

template <typename E>
void forward(Step& s) {
    const Model& m = *s.model;
    Tiles tiles(s.rows);
    int64_t index_here = s.arrived.fetch_add(1);
    Member member(s.phases, index_here, s.threads);
    uint8_t* scratch = s.scratch + index_here * s.scratch_bytes;
    int64_t row_groups = (s.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    auto each_row = [&](auto&& work) {
        member.share(row_groups, [&](int64_t unit, int64_t) {
            int64_t end = (unit + 1) * ROWS_AT_ONCE;
            for (int64_t row = unit * ROWS_AT_ONCE; row < (end < s.rows ? end : s.rows); row++) work(row);
        });
    };
    // `then`: the linear whose codes are read after this one's.
    auto linear = [&](const Linear& of, const Linear& then, const Number* x, auto&& sink) {
        const Number* terms[] = {x};
        member.share(pairs(of), [&](int64_t pair, int64_t next) {
            product(of, turn(member, of, pair, next, then), terms, 1, s.rows, scratch,
                    [&](int64_t row, f32x16 a, f32x16 b, bool both) { sink(pair, row, a, b, both); });
        });
    };
    auto store_at = [&](float* base, int64_t width) {
        return [=](int64_t pair, int64_t row, f32x16 a, f32x16 b, bool both) {
            float* to = base + row * width + pair * PAIR;
            store(to, a);
            if (both) store(to + PANEL, b);
        };
    };
    auto adapt = [&](int64_t index, int64_t kind) {
        if (!s.adapters) return;
        AdapterCall* call = s.lora[index * 4 + kind];
        member.join([&] { s.adapters(call); }, [&] { return call->next_unit.load() >= call->units; });
    };
    // With adapters, a linear that ends in the residual stream takes two phases more.
    auto onto_hidden = [&](const Linear& of, const Linear& then, const Number* x, int64_t index, int64_t kind) {
        if (!s.adapters) {
            linear(of, then, x, [&](int64_t pair, int64_t row, f32x16 a, f32x16 b, bool both) {
                float* to = s.hidden + row * m.hidden + pair * PAIR;
                store(to, load(to) + a);
                if (both) store(to + PANEL, load(to + PANEL) + b);
            });
            return;
        }
        linear(of, then, x, store_at(s.y, of.outputs));
        adapt(index, kind);
        each_row([&](int64_t row) {
            float *to = s.hidden + row * m.hidden, *from = s.y + row * m.hidden;
            for (int64_t i = 0; i < m.hidden; i += 16) store(to + i, load(to + i) + load(from + i));
        });
    };

    for (int64_t index = 0; index < m.layer_count; index++) {
        const Layer& layer = m.layers[index];
        each_row([&](int64_t row) {
            normalize(s.hidden + row * m.hidden, layer.input_norm, m.hidden, m.epsilon,
                      s.x + row * m.hidden, s.inputs + row * m.hidden);
        });
        linear(layer.qkv, layer.o, s.inputs, store_at(s.y, layer.qkv.outputs));
        adapt(index, 0);
        each_row([&](int64_t row) { place<E>(s, m, layer, index, row); });
        member.share(s.rows * m.kv_heads, [&](int64_t unit, int64_t) {
            attend_row<E>(s, m, index, unit, m.heads * m.head_dim);
        });
        onto_hidden(layer.o, layer.gate_up, s.inputs, index, 1);
        each_row([&](int64_t row) {
            normalize(s.hidden + row * m.hidden, layer.mlp_norm, m.hidden, m.epsilon,
                      s.x + row * m.hidden, s.inputs + row * m.hidden);
        });
        auto gated = [](f32x16 gate, f32x16 up) { return gate / (1.f + exponential(-gate)) * up; };
        if (!s.adapters) {
            linear(layer.gate_up, layer.down, s.inputs, [&](int64_t pair, int64_t row, f32x16 a, f32x16 b, bool) {
                store(s.gated + row * m.inner + pair * PANEL, gated(a, b));
            });
        } else {
            linear(layer.gate_up, layer.down, s.inputs, [&](int64_t pair, int64_t row, f32x16 a, f32x16 b, bool) {
                float* to = s.y + row * 2 * m.inner + pair * PANEL;
                store(to, a);
                store(to + m.inner, b);
            });
            adapt(index, 2);
            each_row([&](int64_t row) {
                const float* from = s.y + row * 2 * m.inner;
                for (int64_t i = 0; i < m.inner; i += 16) {
                    f32x16 v = gated(load(from + i), load(from + m.inner + i));
                    store(s.x + row * m.inner + i, v);
                    store(s.gated + row * m.inner + i, v);
                }
            });
        }
        const Linear& after = index + 1 < m.layer_count ? m.layers[index + 1].qkv : layer.down;
        onto_hidden(layer.down, after, s.gated, index, 3);
    }
}

struct Logits {
    int64_t rows;
    const float* hidden;  // [rows, width]
    const float* norm;    // [width]
    float epsilon;
    Linear head;
    float* x;         // [rows, width]: normalized
    Number* high;     // [rows padded to 32, width] x, or its bf16
    Number* low;      // bf16 of what `high` lacks: logits are sums of fp32 activations
    float* logits;    // [rows, outputs]
    uint8_t* scratch;
    int64_t scratch_bytes, threads;
    std::atomic<int64_t> arrived;
    Phase* phases;
};

}  // namespace

extern "C" {

// Layouts that the caller was written for: sizes in bytes.
int64_t loramux_size(int64_t which) {
    const int64_t sizes[] = {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Step), sizeof(Logits), sizeof(AdapterCall),
                             sizeof(Number), SUMS * sizeof(float)};
    return sizes[which];
}

// What the arithmetic runs on: 3 matrix unit, 2 bf16 dot products, 1 fp32 vectors, 0 what the compiler
// makes of it; -1 when the system refuses it.
int64_t loramux_begin() {
#if defined(HAS_AMX)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 3 : -1;
#elif defined(HAS_BF16)
    return 2;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return 1;
#else
    return 0;
#endif
}

void loramux_forward(void* argument) {
    Step& step = *(Step*)argument;
    if (step.model->kv_fp32) forward<float>(step);
    else forward<uint16_t>(step);
}

void loramux_adapters(void* argument) {
    static thread_local Room room;
    Tiles tiles(TILE_ROWS);
    AdapterPass(*(AdapterCall*)argument, room).run();
}

void loramux_logits(void* argument) {
    Logits& s = *(Logits*)argument;
    Tiles tiles(s.rows);
    int64_t index = s.arrived.fetch_add(1);
    Member member(s.phases, index, s.threads);
    uint8_t* scratch = s.scratch + index * s.scratch_bytes;
    int64_t width = s.head.inputs;
    member.share(s.rows, [&](int64_t row, int64_t) {
        float* x = s.x + row * width;
        Number *high = s.high + row * width, *low = s.low + row * width;
        normalize(s.hidden + row * width, s.norm, width, s.epsilon, x, high);
        for (int64_t i = 0; i < width && FP32_TERMS == 2; i += 16) store(low + i, load(x + i) - load(high + i));
    });
    const Number* terms[] = {s.high, s.low};
    member.share(pairs(s.head), [&](int64_t pair, int64_t next) {
        product(s.head, turn(member, s.head, pair, next, s.head), terms, FP32_TERMS, s.rows, scratch,
                [&](int64_t row, f32x16 a, f32x16 b, bool both) {
                    float* to = s.logits + row * s.head.outputs + pair * PAIR;
                    store(to, a);
                    if (both) store(to + PANEL, b);
                });
    });
}

}  // extern "C"
