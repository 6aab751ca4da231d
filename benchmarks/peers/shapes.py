# SPDX-License-Identifier: Apache-2.0
"""The decoders of the comparison: the shapes that the benchmark programs know by the same names."""

SHAPES = {
    "qwen3-8b": dict(hidden=4096, inner=12288, heads=32, kv_heads=8, head_dim=128, layers=36, vocabulary=151936),
    "qwen3-1.7b": dict(hidden=2048, inner=6144, heads=16, kv_heads=8, head_dim=128, layers=28, vocabulary=151936),
    "qwen3-0.6b": dict(hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, layers=28, vocabulary=151936),
    "tiny": dict(hidden=128, inner=384, heads=4, kv_heads=2, head_dim=32, layers=6, vocabulary=997),
}


def shape_of(name, layers=0):
    """A copy of the shape with its name in it; layers 0: as the shape has."""
    shape = dict(SHAPES[name], name=name)
    if layers:
        shape["layers"] = layers
    return shape


def block_bytes(shape):
    """Bytes of one decoder layer in bf16: seven linear maps and four norms."""
    queries, keys = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    attention = shape["hidden"] * (2 * queries + 2 * keys)
    mlp = 3 * shape["hidden"] * shape["inner"]
    return 2 * (attention + mlp + 2 * shape["hidden"] + 2 * shape["head_dim"])


class Workload:
    """forward/BxT: the decoder. lora_step/T: LoRA step with head, loss and AdamW. decoder_step/T: the same without head.
    decode/T: one more token of one sequence, with a KV cache of T tokens before it."""

    KINDS = ("forward", "decode", "lora_step", "decoder_step")

    def __init__(self, name):
        self.name = name
        self.kind, _, size = name.partition("/")
        batch, _, tokens = size.rpartition("x")
        if self.kind not in self.KINDS or not tokens.isdigit() or not (batch or "1").isdigit():
            raise ValueError(f"unknown workload {name}: {', '.join(kind + '/[Bx]T' for kind in self.KINDS)}")
        self.batch, self.tokens = int(batch or 1), int(tokens)

    @property
    def trains(self):
        return self.kind in ("lora_step", "decoder_step")

    @property
    def passes(self):
        """How often a run needs each block, if nothing stays on the device."""
        return 2 if self.trains else 1
