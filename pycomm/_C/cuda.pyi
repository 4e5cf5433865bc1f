from collections.abc import Sequence

def build() -> str: ...
def device_count() -> int: ...
def set_nccl_folders(arg0: Sequence[str], /) -> None: ...
def emulated_device() -> int: ...
def built_in_selection() -> dict[str, list[tuple[int, str]]]: ...
def why_not_built() -> str | None: ...
def cast(
    dst_dtype: str, dst: int, src_dtype: str, src: int, n_elems: int, scale: float, device: int, stream: int
) -> None: ...
def pack(
    dst_dtype: str,
    dst: int,
    src_dtype: str,
    srcs: Sequence[tuple[int, int]],
    scale: float,
    device: int,
    stream: int,
) -> None: ...
def unpack(
    dst_dtype: str,
    dsts: Sequence[tuple[int, int]],
    src_dtype: str,
    src: int,
    scale: float,
    device: int,
    stream: int,
) -> None: ...
def block_maxima(src: int, n_elems: int, maxima: int, device: int, stream: int) -> None: ...
def quantize(
    code_dtype: str,
    codes: int,
    src: int,
    n_elems: int,
    maxima: int,
    feedback: bool,
    device: int,
    stream: int,
) -> None: ...
def dequantize(
    code_dtype: str, dst: int, codes: int, n_elems: int, maxima: int, device: int, stream: int
) -> None: ...
def norm(
    dtype: str, tensors: Sequence[tuple[int, int]], workspace: int, result: int, device: int, stream: int
) -> None: ...
def norm_workspace_bytes(dtype: str, tensors: Sequence[tuple[int, int]]) -> int: ...
