"""Counts unigrams or bigrams of a task's targets, as an n-gram table that drafts for a target model.

  python -m experiments.train_ngram --target=experiments/checkpoints/captions-target --data_dir=DATA \
    --export=runs/bigrams.safetensors
  python -m experiments.generate ... --ngram=runs/bigrams.safetensors --num_draft=ngram:1,ngram:2

It takes seconds. See Leviathan et al. 2023, section 4 and table 3.
"""

import pathlib

from absl import flags
from rich.console import Console

from experiments.lib import start, tasks
from specjax import drafters
from specjax.loading import load_tokenizer
from specjax.models import convert

_TASK = tasks.define_task()
_TARGET = flags.DEFINE_string("target", None, "Target whose tokenizer to use: a directory or hub id.")
_SPLIT = flags.DEFINE_string("split", "train", "Split of the task.")
_ORDER = flags.DEFINE_enum("order", "2", ["1", "2"], "1: unigrams; 2: bigrams.")
_SUCCESSORS = flags.DEFINE_integer(
    "max_successors", 64, "Maximum number of successors to keep per token.", lower_bound=1
)
_EXPORT = flags.DEFINE_string("export", None, "File to write, such as bigrams.safetensors.")


def main(console: Console) -> None:
    path = pathlib.Path(_EXPORT.value)
    if path.is_dir():
        raise ValueError(f"`--export` must be the name of a file, got the directory {path}")
    config, tokenizer = convert.read_config(_TARGET.value), load_tokenizer(_TARGET.value)
    found = tasks.pairs(_SPLIT.value, _TASK.value)
    texts = tokenizer([target for _, target in found], verbose=False).input_ids
    table = drafters.learn_ngram(
        texts, config.vocab_size, int(_ORDER.value), _SUCCESSORS.value, start_id=config.start_id
    )
    drafters.save_ngram(path, table)
    console.print(
        f"counted {sum(map(len, texts))} tokens in {len(texts)} texts; wrote {path}", soft_wrap=True
    )


if __name__ == "__main__":
    start.run(main, required=["target", "export"])
