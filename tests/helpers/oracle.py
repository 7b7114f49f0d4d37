"""The equations of the papers in NumPy float64, written from the papers and not from
the code under test.

Parameters come as the tree that the model stores: with the same names, and with the
layers of a stack along axis 0.
"""

import math

import numpy as np


def relative(a, b):
    """Return max|a - b| / max|b|."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return np.abs(a - b).max() / np.abs(b).max()


def randomized(tree, seed=0):
    """Return random float32 values for a tree of shapes.

    No bias is zero and no gain is one, so that leaving one out changes the result.
    """
    rng = np.random.default_rng(seed)

    def fill(tree, name):
        if isinstance(tree, dict):
            return {name: fill(tree[name], name) for name in sorted(tree)}
        values = rng.normal(size=tree.shape)
        return np.float32(1 + 0.2 * values if name == "scale" else 0.4 * values)

    return fill(tree, None)


def float64(tree):
    if isinstance(tree, dict):
        return {name: float64(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(query, key, value, mask=None, bias=None, scale=True):
    """Return softmax(Q Kᵀ / √d_k + bias) V, (B, T, N, H'), and the weights, (B, N, T,
    S). Without `scale`, scores are not divided by √d_k.

    Each query is computed on its own, over the keys that it may attend to.
    """
    query, key, value = float64(query), float64(key), float64(value)
    rows, length, heads, width = query.shape
    weights = np.zeros((rows, heads, length, key.shape[1]))
    output = np.zeros((rows, length, heads, value.shape[-1]))
    mask = np.broadcast_to(True if mask is None else mask, weights.shape)
    bias = np.broadcast_to(0.0 if bias is None else bias, weights.shape)
    for b, n, t in np.ndindex(rows, heads, length):
        seen = np.flatnonzero(mask[b, n, t])
        if seen.size:
            weights[b, n, t, seen] = softmax(
                key[b, seen, n] @ query[b, t, n] / (math.sqrt(width) if scale else 1)
                + bias[b, n, t, seen]
            )
        output[b, t, n] = weights[b, n, t] @ value[b, :, n]
    return output, weights


def clipped(tables, i, j):
    """Return a_ij = w[clip(j - i, -k, k)].

    The tables have 2k + 1 rows (Shaw et al. 2018, Section 3.2).
    """
    k = (len(tables) - 1) // 2
    return tables[max(-k, min(k, j - i)) + k]


def relative_attention(
    query, key, value, key_table, value_table, mask=None, bias=None, position=0
):
    """Return relative attention of Shaw et al. 2018.

    e_ij = q_i · (k_j + a_ij^K) / √d_k (eq. 2, 4), z_i = Σ_j α_ij (v_j + a_ij^V) (eq.
    3).
    """
    query, key, value = float64(query), float64(key), float64(value)
    key_table, value_table = float64(key_table), float64(value_table)
    rows, length, heads, width = query.shape
    scores = np.zeros((rows, heads, length, key.shape[1]))
    output = np.zeros((rows, length, heads, value.shape[-1]))
    mask = np.broadcast_to(True if mask is None else mask, scores.shape)
    bias = np.broadcast_to(0.0 if bias is None else bias, scores.shape)
    for b, n, t, j in np.ndindex(scores.shape):
        a = clipped(key_table, position + t, j)
        scores[b, n, t, j] = (
            query[b, t, n] @ (key[b, j, n] + a) / math.sqrt(width) + bias[b, n, t, j]
        )
    for b, n, t in np.ndindex(rows, heads, length):
        seen = np.flatnonzero(mask[b, n, t])
        for j, weight in zip(
            seen, softmax(scores[b, n, t, seen]) if seen.size else (), strict=True
        ):
            output[b, t, n] += weight * (
                value[b, j, n] + clipped(value_table, position + t, j)
            )
    return output


def rotation(m, width, base=10000):
    """Return R^d_Θ,m of RoFormer (Su et al. 2021), eq. 15: blocks (cos mθ_i, -sin
    mθ_i; sin mθ_i, cos mθ_i).
    """
    matrix = np.zeros((width, width))
    for i in range(1, width // 2 + 1):
        angle = m * base ** (-2 * (i - 1) / width)
        block = [
            [math.cos(angle), -math.sin(angle)],
            [math.sin(angle), math.cos(angle)],
        ]
        matrix[2 * i - 2 : 2 * i, 2 * i - 2 : 2 * i] = block
    return matrix


def rotated(x, position=0, base=10000):
    """Rotate each vector of x (B, T, N, H) by its position."""
    x, turned = float64(x), np.zeros(x.shape)
    for b, t, n in np.ndindex(x.shape[:3]):
        turned[b, t, n] = rotation(position + t, x.shape[-1], base) @ x[b, t, n]
    return turned


def bucket(distance, num_buckets, max_distance, causal):
    """Return the bucket of the distance j - i from query i to key j.

    Raffel et al. 2020, Section 2.1, and their code. To one side, the first half of the
    n buckets, e, have the distances 0 … e - 1. Bucket e + i has those from e (m / e)^(i
    / (n - e)) on, where m is `max_distance`. Powers of integers are compared.
    """
    first, n = 0, num_buckets
    if causal:
        distance = max(-distance, 0)
    else:
        n = num_buckets // 2
        first = n if distance > 0 else 0
        distance = abs(distance)
    e = n // 2
    if distance < e:
        return first + distance
    i = 0
    while i + 1 < n - e and (
        distance ** (n - e) * e ** (i + 1) >= max_distance ** (i + 1) * e ** (n - e)
    ):
        i += 1
    return first + e + i


def relative_bias(table, length, max_distance, causal):
    """Return the bias (1, N, T, T) that a table (buckets, N) adds to scores."""
    bias = np.zeros((1, table.shape[1], length, length))
    for n, i, j in np.ndindex(bias.shape[1:]):
        bias[0, n, i, j] = table[bucket(j - i, len(table), max_distance, causal), n]
    return bias


def bias_of(p, config, length, causal):
    """Return the bias of a stack, or None if it has none."""
    if config.positions != "relative_bias":
        return None
    table = float64(p["relative_bias"]["table"])
    return relative_bias(table, length, config.max_bucket_distance, causal)


def linear(p, x):
    return x @ p["kernel"] + p.get("bias", 0.0)


def multi_head(
    p,
    x,
    memory,
    mask=None,
    bias=None,
    positions="none",
    rotary_base=10000,
    scale=True,
):
    """Return Concat(head₁ … head_N) W_O. Self-attention may have relative or rotary
    positions.

    With K key-value heads (Ainslie et al. 2023), the first N / K query heads read the
    first one, and so on.
    """
    p, x, memory = float64(p), float64(x), float64(memory)
    heads = p["query"]["kernel"].shape[1]

    def head(projection, n):
        return {
            "kernel": projection["kernel"][:, n],
            "bias": projection["bias"][n] if "bias" in projection else 0.0,
        }

    def project(name, x):
        shared = heads // p[name]["kernel"].shape[1]
        return np.stack(
            [linear(head(p[name], n // shared), x) for n in range(heads)], axis=2
        )

    query, key, value = (
        project("query", x),
        project("key", memory),
        project("value", memory),
    )
    if positions == "relative":
        tables = p["relative"]["key_table"], p["relative"]["value_table"]
        output = relative_attention(query, key, value, *tables, mask, bias)
    elif positions == "rotary":
        output, _ = attention(
            rotated(query, 0, rotary_base),
            rotated(key, 0, rotary_base),
            value,
            mask,
            bias,
        )
    else:
        output, _ = attention(query, key, value, mask, bias, scale)
    concatenated = np.concatenate([output[:, :, n] for n in range(heads)], axis=-1)
    return concatenated @ np.concatenate(list(p["output"]["kernel"])) + p["output"].get(
        "bias", 0.0
    )


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


ACTIVATIONS = {"relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}


def feed_forward(p, x, activation):
    """Return FFN(x) of Vaswani et al. 2017, eq. 2, or of Shazeer 2020, eq. 6, if
    there is a gate.
    """
    p, x = float64(p), float64(x)
    if "gate" in p:
        return linear(
            p["outer"],
            ACTIVATIONS[activation](linear(p["gate"], x)) * linear(p["inner"], x),
        )
    return linear(p["outer"], ACTIVATIONS[activation](linear(p["inner"], x)))


def layer_norm(p, x, epsilon):
    p, x = float64(p), float64(x)
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * p["scale"] + p["bias"]


def rms_norm(p, x, epsilon):
    """Return x / RMS(x) · g (Zhang and Sennrich 2019, eq. 4)."""
    p, x = float64(p), float64(x)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * p["scale"]


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}


def residual(p, x, sublayer, norm, epsilon):
    """Return norm(x + f(x)) for post-norm, x + f(norm(x)) for pre-norm.

    The type of the norm is its name in p.
    """
    ((kind, p),) = p.items()
    if norm == "post":
        return NORMS[kind](p, x + sublayer(x), epsilon)
    return x + sublayer(NORMS[kind](p, x, epsilon))


def encoder_block(p, x, mask, config, bias=None):
    def around(name, sublayer, x):
        return residual(
            p[f"{name}_residual"], x, sublayer, config.norm, config.norm_epsilon
        )

    def attend(h):
        return multi_head(
            p["self_attention"],
            h,
            h,
            mask,
            bias,
            config.positions,
            config.rotary_base,
            config.scale_scores,
        )

    x = around("self_attention", attend, x)
    return around(
        "feed_forward",
        lambda h: feed_forward(p["feed_forward"], h, config.activation),
        x,
    )


def decoder_block(p, x, memory, self_mask, cross_mask, config, bias=None):
    def around(name, sublayer, x):
        return residual(
            p[f"{name}_residual"], x, sublayer, config.norm, config.norm_epsilon
        )

    def attend(h):
        return multi_head(
            p["self_attention"],
            h,
            h,
            self_mask,
            bias,
            config.positions,
            config.rotary_base,
            config.scale_scores,
        )

    x = around("self_attention", attend, x)
    x = around(
        "cross_attention",
        lambda h: multi_head(
            p["cross_attention"], h, memory, cross_mask, scale=config.scale_scores
        ),
        x,
    )
    return around(
        "feed_forward",
        lambda h: feed_forward(p["feed_forward"], h, config.activation),
        x,
    )


def layer(tree, number):
    if isinstance(tree, dict):
        return {name: layer(branch, number) for name, branch in tree.items()}
    return tree[number]


def sinusoids(length, d_model):
    """Return PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos /
    10000^(2i/d)).
    """
    waves = np.zeros((length, d_model))
    for position in range(length):
        for i in range(d_model):
            if 2 * i < d_model:
                waves[position, 2 * i] = math.sin(position / 10000 ** (2 * i / d_model))
            if 2 * i + 1 < d_model:
                waves[position, 2 * i + 1] = math.cos(
                    position / 10000 ** (2 * i / d_model)
                )
    return waves


def sinusoids_in_halves(length, d_model):
    """Return the sines of all pairs, then the cosines of all pairs.

    With an odd d, the last pair has no cosine.
    """
    waves, sines = np.zeros((length, d_model)), math.ceil(d_model / 2)
    for position, i in np.ndindex(length, sines):
        waves[position, i] = math.sin(position / 10000 ** (2 * i / d_model))
        if sines + i < d_model:
            waves[position, sines + i] = math.cos(position / 10000 ** (2 * i / d_model))
    return waves


def embed(params, config, ids, embedding="embedding", positions="positions", norm=""):
    """Return the token vectors, scaled if the config says so, plus the position
    vectors, and of their sums the norm called `norm`, if there is one.
    """
    x = params[embedding]["table"][ids] * (
        math.sqrt(config.d_model) if config.embedding_scale else 1
    )
    if config.positions == "sinusoidal":
        x = x + sinusoids(ids.shape[1], config.d_model)
    elif config.positions == "sinusoidal_halves":
        x = x + sinusoids_in_halves(ids.shape[1], config.d_model)
    elif config.positions == "learned":
        x = x + params[positions]["table"][: ids.shape[1]]
    if norm in params:
        x = NORMS[config.norm_type](params[norm], x, config.norm_epsilon)
    return x


def finished(p, config, x):
    return (
        x
        if config.norm == "post"
        else NORMS[config.norm_type](p["final_norm"], x, config.norm_epsilon)
    )


def stack(p, config, x, mask, causal=False):
    """Apply a stack without cross-attention."""
    return stack_outputs(p, config, x, mask, causal)[-1]


def stack_outputs(p, config, x, mask, causal=False):
    """Return the output of every layer. Only that of the last one is `finished`."""
    outputs, bias = [x], bias_of(p, config, x.shape[1], causal)
    for number in range(len(p["layers"]["feed_forward"]["inner"]["kernel"])):
        outputs.append(
            encoder_block(layer(p["layers"], number), outputs[-1], mask, config, bias)
        )
    return [*outputs[1:-1], finished(p, config, outputs[-1])]


def gpt(params, config, tokens, valid=None):
    """Return the logits (B, T, V) of the next token, without the padding of the
    vocabulary.
    """
    params, (rows, length) = float64(params), tokens.shape
    mask = np.zeros((rows, 1, length, length), bool)
    for b, t in np.ndindex(rows, length):
        for earlier in range(t + 1):
            mask[b, 0, t, earlier] = valid is None or valid[b, earlier]
    x = stack(params["decoder"], config, embed(params, config, tokens), mask, True)
    table = params["embedding" if config.tie_embeddings else "output"]["table"]
    return x @ table[: config.vocab_size].T


POOLERS = {"tanh": np.tanh, "gelu": ACTIVATIONS["gelu"]}


def bert_layers(params, config, tokens, valid, segments):
    """Return the output of every layer (B, T, D)."""
    params, (rows, length) = float64(params), tokens.shape
    x = embed(params, config, tokens) + params["segments"][segments]
    mask = np.zeros((rows, 1, length, length), bool)
    for b, t in np.ndindex(rows, length):
        seen = t + 1 if config.causal else length
        mask[b, 0, t, :seen] = valid[b, :seen]
    norm = NORMS[config.norm_type]
    x = norm(params["norm"], x, config.norm_epsilon)
    if config.embedding_dim:
        x = linear(params["embeddings_project"], x)
    return stack_outputs(params["encoder"], config, x, mask, config.causal)


def bert(params, config, tokens, valid, segments):
    """Return the last layer (B, T, D) and the pooled vector (B, D), of the first
    token or, if causal, of the last.
    """
    x = bert_layers(params, config, tokens, valid, segments)[-1]
    pooled = [
        row[np.flatnonzero(seen)[-1] if config.causal else 0]
        for row, seen in zip(x, valid, strict=True)
    ]
    activation = POOLERS[config.pooler_activation]
    return x, activation(linear(float64(params["pooler"]), np.array(pooled)))


def masked_lm(params, config, x):
    """Return the logits (B, P, V) of masked tokens: h = norm(activation(x W + b)), h
    Eᵀ + c, with the embeddings E.
    """
    head, table = (
        float64(params["masked_lm"]),
        float64(params["bert"]["embedding"]["table"]),
    )
    h = ACTIVATIONS[config.activation](linear(head["transform"], x))
    h = NORMS[config.norm_type](head["norm"], h, config.norm_epsilon)
    return (h @ table.T + head["bias"])[..., : config.vocab_size]


def transformer(params, config, source, target, source_valid=None, target_valid=None):
    """Return the logits (B, T, V) of the next target token, without the padding of
    the vocabulary.
    """
    params = float64(params)
    rows, source_length = source.shape
    length = target.shape[1]
    source_valid = np.ones(source.shape, bool) if source_valid is None else source_valid
    target_valid = np.ones(target.shape, bool) if target_valid is None else target_valid
    source_mask = np.zeros((rows, 1, 1, source_length), bool)
    target_mask = np.zeros((rows, 1, length, length), bool)
    for b in range(rows):
        source_mask[b, 0, 0] = source_valid[b]
        for t in range(length):
            for earlier in range(t + 1):
                target_mask[b, 0, t, earlier] = target_valid[b, earlier]

    shared = config.tie_embeddings in ("all", "embeddings")
    assert ("source_norm" in params) == config.embedding_norm
    x = embed(
        params,
        config,
        source,
        "target_embedding" if shared else "source_embedding",
        "source_positions",
        "source_norm",
    )
    memory = stack(params["encoder"], config, x, source_mask)

    x = embed(
        params, config, target, "target_embedding", "target_positions", "target_norm"
    )
    bias = bias_of(params["decoder"], config, length, True)
    for number in range(config.num_decoder_layers):
        x = decoder_block(
            layer(params["decoder"]["layers"], number),
            x,
            memory,
            target_mask,
            source_mask,
            config,
            bias,
        )
    x = finished(params["decoder"], config, x)
    if config.output_scale:
        x = x / math.sqrt(config.d_model)

    if config.tie_embeddings in ("embeddings", "none"):
        logits = x @ params["output"]["table"].T + params["output"].get("bias", 0.0)
    else:
        logits = x @ params["target_embedding"]["table"].T + params.get(
            "output_bias", 0.0
        )
    return logits[..., : config.target_vocab_size]


def smoothed(labels, vocab_size, label_smoothing):
    """Return q: ε / V for every token, plus 1 - ε for the label."""
    q = np.full((*labels.shape, vocab_size), label_smoothing / vocab_size)
    for place in np.ndindex(labels.shape):
        q[(*place, labels[place])] += 1 - label_smoothing
    return q


def cross_entropy(logits, labels, weights, label_smoothing=0.0):
    """Return (Σ w · -Σ q log p, Σ w) for logits (B, T, V)."""
    log_p = np.log(softmax(float64(logits)))
    losses = -(smoothed(labels, logits.shape[-1], label_smoothing) * log_p).sum(axis=-1)
    return (weights * losses).sum(), weights.sum()


def learning_rate(config, d_model, n):
    """Return the learning rate of update n = 1, 2, … Without warm-up, the peak is at
    the first update.
    """
    peak, warmup = config.learning_rate, config.warmup_steps or 1
    if config.schedule == "noam":
        return peak * d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
    if n < warmup:
        return peak * n / warmup
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(warmup / n)
    if config.schedule == "constant":
        return peak
    done = min((n - warmup) / (config.decay_steps - warmup), 1.0)
    if config.schedule == "linear":
        return peak * (done * config.end_fraction + (1 - done))
    return peak * (
        config.end_fraction
        + (1 - config.end_fraction) * (1 + math.cos(math.pi * done)) / 2
    )


def adam(
    params,
    gradients,
    rates,
    *,
    b1,
    b2,
    epsilon,
    weight_decay=0.0,
    decayed=(),
    clip_norm=0.0,
):
    """Return the parameters after Algorithm 1 of Kingma and Ba 2015.

    Gradients are clipped to a norm first. Decoupled weight decay applies to the names
    in `decayed`.
    """
    params = float64(params)
    m = {name: np.zeros_like(p) for name, p in params.items()}
    v = {name: np.zeros_like(p) for name, p in params.items()}
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        gradient = float64(gradient)
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        cut = clip_norm / norm if clip_norm and norm > clip_norm else 1.0
        for name, p in params.items():
            m[name] = b1 * m[name] + (1 - b1) * cut * gradient[name]
            v[name] = b2 * v[name] + (1 - b2) * (cut * gradient[name]) ** 2
            step = (m[name] / (1 - b1**t)) / (np.sqrt(v[name] / (1 - b2**t)) + epsilon)
            params[name] = p - rate * (step + weight_decay * p * (name in decayed))
    return params


# Recurrent models. Parameters have the names of flax: `i` for the input or `h` for the
# previous state, then the gate.


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(p, h, x):
    """Return the next h of Cho et al. 2014, with the reset gate applied after the
    matrix product.
    """

    def gate(name):
        return x @ p[f"i{name}"]["kernel"] + p[f"i{name}"]["bias"], h @ p[f"h{name}"][
            "kernel"
        ]

    r, z = sigmoid(sum(gate("r"))), sigmoid(sum(gate("z")))
    of_x, of_h = gate("n")
    n = np.tanh(of_x + r * (of_h + p["hn"]["bias"]))
    return (1 - z) * n + z * h


def lstm(p, carry, x):
    """Return the next (c, h) of Hochreiter and Schmidhuber 1997, with forget gates."""
    c, h = carry

    def gate(name):
        return (
            x @ p[f"i{name}"]["kernel"]
            + h @ p[f"h{name}"]["kernel"]
            + p[f"h{name}"]["bias"]
        )

    c = sigmoid(gate("f")) * c + sigmoid(gate("i")) * np.tanh(gate("g"))
    return c, sigmoid(gate("o")) * np.tanh(c)


def recurrent_lm(params, config, tokens):
    """Return the logits (T, V) of the next token for one text, read token by token
    from a state of zero.
    """
    p, c = float64(params), config
    zero = np.zeros(c.d_model)
    carries, logits = [zero if c.cell == "gru" else (zero, zero)] * c.num_layers, []
    for token in tokens:
        x = p["embedding"]["table"][token] * math.sqrt(c.d_model)
        for number in range(c.num_layers):
            cell = p[f"cells_{number}"]
            carries[number] = (
                gru(cell, carries[number], x)
                if c.cell == "gru"
                else lstm(cell, carries[number], x)
            )
            x = carries[number] if c.cell == "gru" else carries[number][1]
        output = p["embedding" if c.tie_embeddings else "output"]
        logits.append(output["table"] @ x + output.get("bias", 0.0))
    return np.array(logits)[:, : c.vocab_size]


def additive(s, h, w_a, u_a, v):
    """Return e_j = vᵀ tanh(W_a s + U_a h_j), with vectors as rows: s (D,), h (S, C)
    → (S,).
    """
    return np.array([np.tanh(s @ w_a + h_j @ u_a) @ v for h_j in h])


def concat(s, h, w, v):
    """Return e_j = vᵀ tanh(W [s; h_j])."""
    return np.array([np.tanh(np.concatenate([s, h_j]) @ w) @ v for h_j in h])


class Recurrent:
    """Recurrent model that reads one sentence, word by word, without padding.

    `c` is its config, `p` its parameters.
    """

    def __init__(self, c, p):
        self.c, self.p = c, float64(p)

    def cell(self, p, carry, x):
        """Return the next carry and h."""
        if self.c.cell == "gru":
            h = gru(p, carry, x)
            return h, h
        carry = lstm(p, carry, x)
        return carry, carry[1]

    def zero(self, width):
        return (
            np.zeros(width)
            if self.c.cell == "gru"
            else (np.zeros(width), np.zeros(width))
        )

    def embed(self, name, ids):
        return self.p[f"{name}_embedding"]["table"][ids] * math.sqrt(
            self.c.embedding_dim
        )

    def read(self, p, x, backwards):
        carry, h = (
            self.zero(p["hn" if self.c.cell == "gru" else "hi"]["kernel"].shape[1]),
            [None] * len(x),
        )
        for j in reversed(range(len(x))) if backwards else range(len(x)):
            carry, h[j] = self.cell(p, carry, x[j])
        return carry, np.array(h)

    def encode(self, source):
        c, p, x, first = self.c, self.p["encoder"], self.embed("source", source), []
        if c.encoder == "none":
            return self.annotations(x)
        for layer in range(c.num_layers + c.pyramid_layers):
            if layer >= c.num_layers:
                whole = [*x, np.zeros_like(x[0])][: len(x) + len(x) % 2]
                x = np.array(
                    [np.append(*whole[i : i + 2]) for i in range(0, len(whole), 2)]
                )
            carry, forward = self.read(p[f"forward_{layer}"], x, c.reverse_source)
            if not c.bidirectional:
                x, summary = forward, carry if c.cell == "gru" else carry[1]
                first.append(carry)
                continue
            back, backward = self.read(p[f"backward_{layer}"], x, True)
            x = np.concatenate([forward, backward], axis=1)
            summary = np.concatenate([forward[-1], backward[0]])
            parts = [back] if c.cell == "gru" else list(back)
            bridged = []
            if layer < c.pyramid_layers:
                continue
            for i, part in enumerate(parts):
                bridge = p[f"bridge_{layer}_{i}"]
                bridged.append(np.tanh(part @ bridge["kernel"] + bridge["bias"]))
            first.append(bridged[0] if c.cell == "gru" else tuple(bridged))
        return x, summary, first[-c.num_layers :]

    def annotations(self, x):
        """Xu et al. 2015, Section 3.1.2."""
        mean = sum(x) / len(x)
        first = []
        for layer in range(self.c.num_layers):
            parts = [
                np.tanh(linear(self.p["encoder"][f"first_{layer}_{i}"], mean))
                for i in range(2 if self.c.cell == "lstm" else 1)
            ]
            first.append(tuple(parts) if self.c.cell == "lstm" else parts[0])
        return x, mean, first

    def look(self, s, h):
        """Return the context (C,) and the weights (N, S)."""
        c, p, length = self.c, self.p["decoder"].get("alignment"), len(h)
        values, heads = h[None], 1
        if c.attention == "additive":
            scores = additive(s, h, p["query"]["kernel"], p["key"]["kernel"], p["v"])[
                None
            ]
        elif c.attention == "concat":
            scores = concat(
                s, h, np.concatenate([p["query"]["kernel"], p["key"]["kernel"]]), p["v"]
            )[None]
        elif c.attention == "dot":
            scores = np.array([[s @ h_j for h_j in h]])
        elif c.attention == "general":
            scores = np.array([[s @ p["w"] @ h_j for h_j in h]])
        else:
            heads = p["query"]["kernel"].shape[1]
            query = [s @ p["query"]["kernel"][:, n] for n in range(heads)]
            keys = [h @ p["key"]["kernel"][:, n] for n in range(heads)]
            values = [h @ p["value"]["kernel"][:, n] for n in range(heads)]
            scores = np.array(
                [keys[n] @ query[n] / math.sqrt(len(query[n])) for n in range(heads)]
            )
        if c.damping:
            scores = scores * np.exp(-p["damping"] * scores)
        if c.local_window:
            center = length * sigmoid(
                np.tanh(s @ p["position"]["kernel"]) @ p["position_v"]
            )
            weights = np.zeros((1, length))
            inside = [j for j in range(length) if abs(j - center) <= c.local_window]
            if inside:
                sigma = c.local_window / 2
                gauss = np.exp(-((np.array(inside) - center) ** 2) / (2 * sigma**2))
                weights[0, inside] = softmax(scores[0, inside]) * gauss
        else:
            weights = softmax(scores)
        seen = [weights[n] @ values[n] for n in range(heads)]
        if c.attention in ("scaled_dot", "multi_head"):
            return sum(
                seen[n] @ p["output"]["kernel"][n] for n in range(heads)
            ), weights
        return seen[0], weights

    def __call__(self, source, target):
        """Return logits (T, V) and weights (N, T, S)."""
        c, p = self.c, self.p["decoder"]
        h, summary, carries = self.encode(source)
        fed, logits, all_weights = np.zeros(c.d_model), [], []

        def recur(x):
            for layer in range(c.num_layers):
                carries[layer], x = self.cell(p[f"cells_{layer}"], carries[layer], x)
            return x

        for y in self.embed("target", target):
            if c.attention == "none" and c.summary == "initial":
                output = recur(y)
            elif c.attention in ("none", "additive"):
                context = summary
                if c.attention == "additive":
                    before = carries[-1] if c.cell == "gru" else carries[-1][1]
                    context, weights = self.look(before, h)
                    all_weights.append(weights)
                if c.context_gate:
                    context = sigmoid(p["gate_w"] @ before + p["gate_b"]) * context
                s = recur(np.concatenate([y, context]))
                output = np.concatenate([s, context, y])
                if c.readout == "maxout":
                    pairs = output @ p["maxout"]["kernel"] + p["maxout"]["bias"]
                    output = np.maximum(pairs[0::2], pairs[1::2])
            else:
                s = recur(np.concatenate([y, fed]) if c.input_feeding else y)
                context, weights = self.look(s, h)
                all_weights.append(weights)
                output = fed = np.tanh(
                    np.concatenate([context, s]) @ p["combine"]["kernel"]
                )
            logits.append(self.p["output"]["table"] @ output + self.p["output"]["bias"])
        return np.array(logits), np.array(all_weights).swapaxes(
            0, 1
        ) if all_weights else None


class ConvS2S:
    """ConvS2S (Gehring et al. 2017) that reads one sentence, position by position,
    without padding.

    `c` is its config, `p` its parameters. With `of_z`, other parameters compute z, the
    encoder's output; the embedding e in the values of attention is that of `p`.
    """

    def __init__(self, c, p, of_z=None):
        self.c, self.p = c, float64(p)
        self.of_z = self.p if of_z is None else float64(of_z)

    def affine(self, p, x):
        """Return W x + b for a vector x, where W = g v / ‖v‖ for each output with
        weight normalization.
        """
        y = np.zeros(len(p["bias"]))
        for output, row in enumerate(p["kernel"].T):
            if self.c.weight_norm:
                row = p["scale"][output] * row / math.sqrt(sum(row**2))
            y[output] = sum(row * x) + p["bias"][output]
        return y

    def block(self, p, x, width, left):
        """Return (v(W [x_{i-left}, …] + b) + x_i) √0.5 at each position i, where each
        window has `width` positions, v([A B]) = A ⊗ σ(B), and x is zero outside.
        """
        outputs = []
        for i in range(len(x)):
            window = []
            for j in range(i - left, i - left + width):
                window.extend(x[j] if 0 <= j < len(x) else np.zeros(self.c.d_model))
            y = self.affine(p["convolution"], np.array(window))
            gated = y[: self.c.d_model] * sigmoid(y[self.c.d_model :])
            outputs.append((gated + x[i]) * math.sqrt(0.5))
        return outputs

    def embed(self, p, side, ids):
        words, positions = p[f"{side}_embedding"], p[f"{side}_positions"]
        return [
            words["table"][id_] + positions["table"][i] for i, id_ in enumerate(ids)
        ]

    def encode(self, p, source):
        """Return z, with parameters p."""
        x = [
            self.affine(p["encoder"]["first"], e)
            for e in self.embed(p, "source", source)
        ]
        width = self.c.encoder_kernel_width
        for layer in range(self.c.num_encoder_layers):
            x = self.block(p["encoder"][f"block_{layer}"], x, width, (width - 1) // 2)
        return [self.affine(p["encoder"]["last"], x_j) for x_j in x]

    def attend(self, p, h, g, z, e):
        """Return c and the weights at one position (eqs. 1 and 2, Section 3.4)."""
        m = len(z)
        d = self.affine(p["query"], h) + g
        a = softmax(np.array([sum(d * z_j) for z_j in z]))
        c = sum(a[j] * (z[j] + e[j]) for j in range(m)) * m * math.sqrt(1 / m)
        return self.affine(p["context"], c), a

    def __call__(self, source, target):
        """Return logits (T, V) and weights (L, T, S)."""
        p, width = self.p["decoder"], self.c.decoder_kernel_width
        z, e = self.encode(self.of_z, source), self.embed(self.p, "source", source)
        g, all_weights = self.embed(self.p, "target", target), []
        x = [self.affine(p["first"], g_i) for g_i in g]
        for layer in range(self.c.num_decoder_layers):
            h = self.block(p[f"block_{layer}"], x, width, width - 1)
            attention = p[f"attention_{layer}"]
            seen = [
                self.attend(attention, *pair, z, e) for pair in zip(h, g, strict=True)
            ]
            x = [h_i + c_i for h_i, (c_i, _) in zip(h, seen, strict=True)]
            all_weights.append([weights for _, weights in seen])
        output = {**self.p["output"], "kernel": self.p["output"]["kernel"].T}
        logits = [self.affine(output, self.affine(p["last"], x_i)) for x_i in x]
        return np.array(logits)[:, : self.c.target_vocab_size], np.array(all_weights)
