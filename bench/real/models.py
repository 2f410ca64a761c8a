"""Makes two Llama models without weights, for ``--load-format dummy``; runs in vLLM's own environment.

A step of ``tiny`` is mostly overhead, one of ``mid`` mostly computing. Prompts are token ids: any tokenizer
serves.
"""

import json
import os
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # type: ignore[import-not-found]

_VOCABULARY = 2048
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 3,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
}
_SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "mid": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def main(folder: Path) -> None:
    """Write both models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    # Any text will do: the interpreter's own modules are on every machine.
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:100]
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in modules), trainer)
    for name, shape in _SHAPES.items():
        model = folder / name
        model.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(model / "tokenizer.json"))
        for file, content in (
            ("config.json", _COMMON | shape),
            ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **_SPECIAL}),
            ("special_tokens_map.json", _SPECIAL),
            ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}),
        ):
            (model / file).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
