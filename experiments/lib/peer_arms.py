"""Other libraries as arms: functions from the index of a source to the ids of its output.

Decoding is greedy, at batch 1, in float32 unless an arm's name has another dtype, with as many threads as
cores. Inputs and outputs are ids: no arm tokenizes text.
"""

import logging
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from experiments.lib import results
from experiments.lib.peer_cases import Case

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

Arm = Callable[[int], list[int]]
# Each arm, or the reason that it does not run.
Arms = dict[str, Arm | str]

NOT_INSTALLED = "not installed: pip install -e '.[peers]'"
NO_DRAFT = "not applicable: drafts of random weights are never accepted"
PACKAGES = ("torch", "ctranslate2", "onnxruntime", "onnx", "onnxscript")


def load_torch(directory: str) -> Any:
    """Loads the T5 of transformers in torch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(results.num_cores())
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    # `generate` makes a cache with a slot per layer of `model.config`, which counts those of the encoder
    # (transformers 5.24): too few for a deeper decoder. Encoder and decoder have configs of their own, so
    # nothing else reads this number.
    model.config.num_layers = model.config.num_decoder_layers
    return model


def transformers_arms(case: Case, folder: pathlib.Path) -> Arms:
    """Returns `generate`: autoregressive, assisted by the draft model, and with prompt lookup."""
    import torch

    del folder
    model = load_torch(case.directory)
    inputs = [torch.tensor(ids, dtype=torch.long)[None] for ids in case.sources]

    def arm(**options: Any) -> Arm:
        def run(source: int) -> list[int]:
            with torch.inference_mode():
                ids = model.generate(
                    inputs[source], max_new_tokens=case.max_new_tokens, do_sample=False, **options
                )
            return ids[0, 1:].tolist()

        return run

    lookup = max(case.lengths, default=10)
    made: Arms = {"transformers (torch) generate": arm()}
    for num_draft in (*case.lengths, None):
        name = f"transformers, assisted, {f'K = {num_draft}' if num_draft else 'default settings'}"
        made[name] = (
            NO_DRAFT if case.draft_directory is None else arm(assistant_model=assistant(case, num_draft))
        )
    name = f"transformers, prompt lookup of {lookup}"
    return {**made, name: NO_DRAFT if case.draft_directory is None else arm(prompt_lookup_num_tokens=lookup)}


def assistant(case: Case, num_draft: int | None) -> Any:
    """Loads the draft model, to draft `num_draft` tokens per round; None: the library's defaults."""
    model = load_torch(str(case.draft_directory))
    if num_draft is not None:
        model.generation_config.num_assistant_tokens = num_draft
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0  # otherwise a draft may stop earlier
    return model


class Ids:
    """A vocabulary whose tokens are ids in brackets, because CTranslate2 works on strings."""

    def __init__(self, config: Any):
        self.tokens = [f"<{i}>" for i in range(config.vocab_size)]
        self.pad_token, self.eos_token = self.tokens[config.pad_id], self.tokens[config.eos_id]
        self.unk_token = self.tokens[2]

    def get_vocab(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, index: int) -> str:
        return self.tokens[index]


def ctranslate2_arms(case: Case, folder: pathlib.Path) -> Arms:
    """Returns CTranslate2 with its own converter, in float32 and with int8 weights."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    vocabulary = Ids(case.config)

    class Converter(TransformersConverter):
        """Needs no tokenizer files: a random shape has none."""

        def load_tokenizer(self, *args: Any, **options: Any) -> Ids:
            return vocabulary

    path = str(folder / "ctranslate2")
    load_torch(case.directory)  # raises if torch is missing, and silences transformers
    Converter(case.directory).convert(path, quantization="float32")
    inputs = [[vocabulary.tokens[i] for i in ids] for ids in case.sources]

    def arm(compute_type: str) -> Arm:
        translator = ctranslate2.Translator(
            path, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=results.num_cores()
        )

        def run(source: int) -> list[int]:
            (result,) = translator.translate_batch(
                [inputs[source]],
                beam_size=1,
                max_decoding_length=case.max_new_tokens,
                max_input_length=0,
                return_end_token=True,
            )
            return [int(token[1:-1]) for token in result.hypotheses[0]]

        return run

    return {f"CTranslate2, {compute_type}": arm(compute_type) for compute_type in ("float32", "int8")}


def onnxruntime_arms(case: Case, folder: pathlib.Path) -> Arms:
    """Returns ONNX Runtime with the graphs that `onnx_peer` exports."""
    from experiments.lib import onnx_peer

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the exporter about itself
        run = onnx_peer.runner(
            load_torch(case.directory), folder, case.max_new_tokens, case.config.start_id, case.config.eos_id
        )
    return {"ONNX Runtime, own export": lambda source: run(case.sources[source])}


BUILDERS: dict[str, Callable[[Case, pathlib.Path], Arms]] = {
    "transformers": transformers_arms,
    "ctranslate2": ctranslate2_arms,
    "onnxruntime": onnxruntime_arms,
}


def build(library: str, case: Case, folder: pathlib.Path) -> Arms:
    """Returns the arms of one library, or the reason that it does not run if a package is missing."""
    try:
        return BUILDERS[library](case, folder)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        return {library: NOT_INSTALLED}
