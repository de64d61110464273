"""Golden values of the MetaLA layer, token by token in NumPy float64 from the paper's equations (arXiv 2411.10741).

python tests/models/mixers/golden/make_metala.py        writes metala.npz beside this file
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

SIZE, HEADS, LENGTH, BATCH = 12, 3, 11, 2
VARIANTS = {
    "released": {},
    "paper": {"preset": "paper"},
    "no_self_augmentation": {"self_augmentation": False},
    "no_convolution": {"convolution": False},
    "key_projection": {"key_projection": True},
    "kernel_2": {"conv_kernel": 2},
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def layer(x, w, *, preset="released", self_augmentation=True, convolution=True, key_projection=False, conv_kernel=4):
    """x: [batch, length, size] -> y, last state [batch, heads, size / 2 / heads, size / heads]."""
    dk, dv = SIZE // 2 // HEADS, SIZE // HEADS
    y = np.zeros_like(x)
    states = np.zeros((len(x), HEADS, dk, dv))
    for b in range(len(x)):
        for t in range(x.shape[1]):
            c = x[b, t]
            if convolution:
                kernel = w["conv"][:, -conv_kernel:]
                c = sum(kernel[:, conv_kernel - 1 - j] * x[b, t - j] for j in range(conv_kernel) if t >= j)
                if preset == "released":
                    c = silu(c)
            q, v, u = w["q"] @ c, w["v"] @ c, w["g"] @ c + w["g_bias"]
            alpha = sigmoid(w["a"] @ c) ** (1 / 16)
            k = w["k"] @ c if key_projection else 1 - alpha
            heads = []
            for h in range(HEADS):
                key, value = slice(h * dk, (h + 1) * dk), slice(h * dv, (h + 1) * dv)
                states[b, h] = alpha[key, None] * states[b, h] + np.outer(k[key], v[value])
                o = q[key] @ states[b, h] * (dk**-0.5 if preset == "released" else 1)
                if self_augmentation:
                    o = o + sigmoid(np.sum(q[key] * w["aug"][key] * k[key]) * v[value])
                heads.append((o - o.mean()) / np.sqrt(o.var() + 1e-5))
            y[b, t] = w["o"] @ (silu(u) * np.concatenate(heads))
    return y, states


def main():
    random = np.random.default_rng(7)
    normal = lambda *shape: random.standard_normal(shape)  # noqa: E731
    half = SIZE // 2
    weights = {name: normal(half, SIZE) for name in "qak"} | {name: normal(SIZE, SIZE) for name in "vgo"}
    weights |= {"conv": normal(SIZE, 4), "g_bias": normal(SIZE), "aug": normal(half)}
    values = {f"w_{name}": value for name, value in weights.items()} | {"x": normal(BATCH, LENGTH, SIZE)}
    for name, options in VARIANTS.items():
        values[f"y_{name}"], values[f"state_{name}"] = layer(values["x"], weights, **options)
    np.savez_compressed(Path(__file__).with_name("metala.npz"), **values)


if __name__ == "__main__":
    main()
