"""Numbers from papers that several test modules compare with."""

BASE = {}
BIG = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout_rate": 0.3}
# Table 3 of Vaswani et al. 2017 with its column "params", in millions. The numbers are
# rounded. They were counted with another vocabulary than V = 37000: base fits V ≈ 41k,
# big fits V ≈ 36k. Rows without a number there have that of base.
TABLE_3 = {
    "base": (BASE, 65),
    "A h=1": ({"num_heads": 1, "head_dim": 512, "value_dim": 512}, 65),
    "A h=4": ({"num_heads": 4, "head_dim": 128, "value_dim": 128}, 65),
    "A h=16": ({"num_heads": 16, "head_dim": 32, "value_dim": 32}, 65),
    "A h=32": ({"num_heads": 32, "head_dim": 16, "value_dim": 16}, 65),
    "B d_k=16": ({"head_dim": 16}, 58),
    "B d_k=32": ({"head_dim": 32}, 60),
    "C N=2": ({"num_encoder_layers": 2, "num_decoder_layers": 2}, 36),
    "C N=4": ({"num_encoder_layers": 4, "num_decoder_layers": 4}, 50),
    "C N=8": ({"num_encoder_layers": 8, "num_decoder_layers": 8}, 80),
    "C d_model=256": ({"d_model": 256, "head_dim": 32, "value_dim": 32}, 28),
    "C d_model=1024": ({"d_model": 1024, "head_dim": 128, "value_dim": 128}, 168),
    "C d_ff=1024": ({"d_ff": 1024}, 53),
    "C d_ff=4096": ({"d_ff": 4096}, 90),
    "D dropout=0": ({"dropout_rate": 0.0}, 65),
    "D dropout=0.2": ({"dropout_rate": 0.2}, 65),
    "E learned positions": ({"positions": "learned"}, 65),
    "big": (BIG, 213),
}
# Devlin et al. 2019, Section 3: changes of the default config, and the parameters
# without and with the heads of pre-training. The paper rounds to 110M and 340M; these
# are the arrays of the authors' checkpoints.
BERT = {
    "base": ({}, 109_482_240, 110_106_428),
    "large": (
        {"num_layers": 24, "d_model": 1024, "d_ff": 4096, "num_heads": 16},
        335_141_888,
        336_226_108,
    ),
}
# Names in `models.gpt.SIZES` → parameters. Table 2 of Radford et al. 2019 has 117M,
# 345M, 762M and 1542M for GPT-2; the models have more. Table 2 of Touvron et al. 2023
# has 6.7B.
GPT = {
    "mini": 5_240_320,
    "gpt": 116_534_784,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "llama-tiny": 746_624,
}
# Names in `models.t5.SIZES` → parameters. Raffel et al. 2020, Section 3.7, says 60
# million, 220 million, 770 million, 3 billion and 11 billion for version 1.0. These are
# the arrays of the released checkpoints.
T5 = {
    "small": 60_506_624,
    "base": 222_903_552,
    "large": 737_668_096,
    "3b": 2_851_598_336,
    "11b": 11_307_321_344,
    "v1_1-small": 76_961_152,
    "v1_1-base": 247_577_856,
    "v1_1-large": 783_150_080,
    "v1_1-xl": 2_849_757_184,
    "v1_1-xxl": 11_135_332_352,
    "mini": 10_393_344,
}
