"""The checkpoint format of a model family: its tensor names and its config.json."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """One tensor of a checkpoint and its parameter.

    Attributes:
      name: name in the file.
      path: path of the parameter, one key per level of the nested dict.
      kind: "same", or "transposed": the parameter is the file's tensor transposed, then reshaped.
      file_shape, shape: shape in the file, shape of the parameter.
    """

    name: str
    path: tuple[str, ...]
    kind: str
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]


class Format(NamedTuple):
    """The checkpoint format of one family. Names are canonical (see `canonical`).

    Attributes:
      tensor_names: (config) -> every tensor once; copies of the embedding excluded.
      config_to_hf: (config, dtype) -> the parsed config.json.
      canonical: (name in a file) -> its canonical name.
      embedding: (config) -> the name of the embedding that a tied head shares.
      head: the name of an untied head.
      copies: (config) -> names under which a file may store the embedding, in addition or instead.
      has_head_copy: (config) -> whether a tied head is written as a copy of the embedding.
      is_ignored: (name) -> whether a left-over tensor is allowed.
      hints: (missing names, left-over names, config) -> probable errors in config.json.
    """

    tensor_names: Callable[[Any], Iterator[Tensor]]
    config_to_hf: Callable[[Any, str], dict[str, Any]]
    canonical: Callable[[str], str]
    embedding: Callable[[Any], str]
    head: str
    copies: Callable[[Any], tuple[str, ...]]
    has_head_copy: Callable[[Any], bool]
    is_ignored: Callable[[str], bool]
    hints: Callable[[list[str], list[str], Any], list[str]]
