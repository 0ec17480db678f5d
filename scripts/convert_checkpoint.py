"""Converts a checkpoint of pytorch_model.bin into model.safetensors, which specjax reads.

    python scripts/convert_checkpoint.py --input=DIRECTORY --output=DIRECTORY

Needs torch (the extra `parity`). Tokenizer files are copied as they are.
"""

import pathlib
import shutil

from absl import app, flags

_INPUT = flags.DEFINE_string("input", None, "directory or hub id with pytorch_model.bin", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "directory to write", required=True)
_TOKENIZER_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main(_: list[str]) -> None:
    import transformers  # version 5 writes safetensors only

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(_INPUT.value)
    model.save_pretrained(_OUTPUT.value)
    for name in _TOKENIZER_FILES:
        path = transformers.utils.hub.cached_file(
            _INPUT.value, name, _raise_exceptions_for_missing_entries=False
        )
        if path:
            shutil.copy(path, pathlib.Path(_OUTPUT.value) / name)


if __name__ == "__main__":
    app.run(main)
