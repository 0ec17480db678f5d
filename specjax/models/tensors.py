"""How a family of models is stored: the names of its tensors, and its config.json."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Tensor(NamedTuple):
    """One tensor of a checkpoint and the parameter that it is.

    Attributes:
      name: in the file.
      path: of the parameter, a key per level of the nested dict.
      kind: "same", or "transposed": the parameter is the file's tensor transposed, then reshaped.
      file_shape, shape: in the file, and of the parameter.
    """

    name: str
    path: tuple[str, ...]
    kind: str
    file_shape: tuple[int, ...]
    shape: tuple[int, ...]


class Format(NamedTuple):
    """How one family is stored. Names are those that `canonical` gives.

    Attributes:
      tensor_names: (config) -> every tensor once; copies of the embedding excluded.
      config_to_hf: (config, dtype) -> the parsed config.json.
      canonical: (name in a file) -> its name here.
      embedding, head: (config) -> the name of the embedding that a tied head is, and of a head of its own.
      copies: (config) -> names under which copies of the embedding may stand, or stand alone.
      has_head_copy: (config) -> whether a tied head is written beside the embedding.
      is_ignored: (name) -> whether a tensor may be left over.
      hints: (names that are missing, names that are left over, config) -> what may be wrong with config.json.
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
