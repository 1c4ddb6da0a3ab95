"""SGLang's host pools, described to the byte: what kvd has to know to copy pages straight out of them and into them.

Owns nothing: a `Pool` borrows the memory of the host pool that it was made from. Called by kvd.engines.sglang when
SGLang registers its pools; any thread. Nothing is believed of a class: where its first and its last page are, and how
long each piece is, must be what the pool's own `get_page_buffer_meta` says.

    keys and values   [heads, dim] a token and layer, four page layouts; of different widths: a buffer each
    latent (MLA)      one row a token and layer, three page layouts; every tensor rank has the same bytes
    records           one stretch a page and layer in each of several buffers: states (Mamba), keys of an indexer

Objects are in kvd's own format, so that pools of other page layouts read them; keys and values also those of another
tensor parallelism. Of states the ranks' shares are kept as they are, and only as many ranks as wrote them read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvd.errors import UsageError
from kvd.layout.geometry import Geometry, Group, Plane, Rule
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Rank, Split

_KEYS_AND_VALUES: Final = {
    "layer_first": "PLBNHD", "page_first": "PBNLHD", "page_first_direct": "PBLNHD", "page_head": "PBHNLD",
}  # fmt: skip
_LATENT: Final = {"layer_first": "LBNHC", "page_first": "BNLHC", "page_first_direct": "BLNHC"}
_RECORDS: Final = frozenset({"page_first", "page_first_direct"})


@dataclass(slots=True)
class Pool:
    """One rank's pool. `page_slots`: slots of the pool that make a page (one for states); `addresses`: where its
    buffers begin; `named`: what else the name of its pages has to say.
    """

    geometry: Geometry
    layout: PagedLayout
    buffers: list[memoryview]
    addresses: list[int]
    page_slots: int
    dtype: str
    split: Split = field(default_factory=Split)
    rank: Rank = field(default_factory=Rank)
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def chunk_tokens(self) -> int:
        """Rows of one page, as kvd counts them."""
        return self.layout.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of this rank's page."""
        layout = self.layout
        return layout.layers * layout.block_tokens * sum(plane.size_bytes for plane in layout.planes)

    def pieces(self, page: int) -> list[tuple[int, int]]:
        """Address and bytes of each stretch of memory that makes a page, in the order in which the pool tells them."""
        layout = self.layout
        layers = range(layout.layers) if layout.axes.startswith(("LB", "PLB")) else [0]
        joined = layout.order.endswith("C")
        planes = [0] if joined else range(len(layout.planes))
        found: list[tuple[int, int]] = []
        for layer in layers:
            for plane in planes:
                row = sum(p.row_bytes for p in layout.planes) if joined else layout.planes[plane].row_bytes
                size = row * layout.heads * layout.block_tokens * (1 if len(layers) > 1 else layout.layers)
                at = page * layout.stride("B", plane) + layout.plane_offset(plane)
                at += layer * layout.stride("L", plane) if layer else 0
                found.append((self.addresses[layout.tensor_of(layer, plane)] + at, size))
        return found


def describe(host: Any, config: Any) -> Pool:
    """What one host pool of this rank holds and where. `config`: SGLang's HiCacheStorageConfig.

    Raises UsageError(pool) for a pool that cannot be described to the byte, saying which and why.
    """
    if hasattr(host, "temporal_buffer"):
        pool = _states(host, config)
    elif hasattr(host, "index_k_with_scale_buffer"):
        pool = _indexer(host)
    elif hasattr(host, "kv_lora_rank"):
        pool = _latent(host)
    elif hasattr(host, "head_num"):
        pool = _keys_and_values(host, config)
    else:
        raise _refused(host, "it keeps neither keys and values, nor latents, nor states")
    _check(host, pool)
    return pool


def _refused(host: Any, why: str) -> UsageError:
    return UsageError(
        f"a {type(host).__name__} with layout {getattr(host, 'layout', None)!r} is not served: {why}", code="pool"
    )  # fmt: skip


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor: numpy has no bfloat16."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(f"a buffer on {tensor.device} that is not dense is not served", code="pool")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _pages(host: Any, buffers: Iterable[torch.Tensor], page_bytes: Sequence[int]) -> int:
    """How many pages all buffers hold. Raises UsageError(pool) for buffers that are not whole pages of these sizes."""
    counts = {
        (buffer.numel() * buffer.element_size() / size)
        for buffer, size in zip(buffers, page_bytes, strict=True)
    }
    if len(counts) != 1 or not (count := counts.pop()).is_integer() or count < 1:
        raise _refused(host, f"its buffers do not hold the same number of whole pages of {page_bytes} B")
    return int(count)


def _buffers(host: Any) -> list[torch.Tensor]:
    kept = getattr(host, "kv_buffer", None)
    buffers = list(kept) if isinstance(kept, tuple | list) else [kept]
    if not all(torch.is_tensor(buffer) for buffer in buffers):
        raise _refused(host, "it has no memory of its own")
    return buffers


def _keys_and_values(host: Any, config: Any) -> Pool:
    order = _KEYS_AND_VALUES.get(host.layout)
    if order is None:
        raise _refused(host, f"allowed layouts: {', '.join(_KEYS_AND_VALUES)}")
    buffers, dtype, tokens = _buffers(host), _dtype(host.dtype), int(host.page_size)
    layers, heads, dim = int(host.layer_num), int(host.head_num), int(host.head_dim)
    v_dim = int(getattr(host, "v_head_dim", dim))
    if (dim == v_dim) != (len(buffers) == 1):
        raise _refused(host, f"{len(buffers)} buffers for keys of {dim} and values of {v_dim} elements")
    widths = [dim + v_dim] if dim == v_dim else [dim, v_dim]
    pages = _pages(host, buffers, [layers * heads * tokens * width * host.dtype.itemsize for width in widths])
    here, whole = (
        Geometry.attention(layers=layers, kv_heads=count, head_dim=dim, v_head_dim=v_dim, dtype=dtype)
        for count in (heads, heads * config.tp_size)
    )
    layout = PagedLayout(
        order,
        here.groups[0].planes,
        layers,
        pages,
        tokens,
        separate="" if dim == v_dim else "P",
        first_head=heads * config.tp_rank,
    )
    return Pool(
        whole, layout, [_flat(buffer) for buffer in buffers], [buffer.data_ptr() for buffer in buffers], tokens, dtype,
        Split(tp=config.tp_size), Rank(config.tp_rank),
    )  # fmt: skip


def _latent(host: Any) -> Pool:
    """Every tensor rank keeps the same rows: one object for all, which SGLang lets the first rank write."""
    order = _LATENT.get(host.layout)
    if order is None:
        raise _refused(host, f"allowed layouts of latents: {', '.join(_LATENT)}")
    (buffer,), dtype, tokens = _buffers(host), _dtype(host.dtype), int(host.page_size)
    layers, row = int(host.layer_num), int(host.kv_cache_dim)
    latent, rope = int(host.kv_lora_rank), int(host.qk_rope_head_dim)
    if row == latent + rope:
        geometry = Geometry.latent(layers=layers, latent_dim=latent, rope_dim=rope, dtype=dtype)
    else:  # packed in a way of SGLang's own: elements, scales and rotary part in one row
        planes = (Plane("packed", 1, row, dtype),)
        geometry = Geometry([Group(Rule.FULL, tuple(range(layers)), planes)], layers)
    pages = _pages(host, [buffer], [layers * tokens * row * host.dtype.itemsize])
    layout = PagedLayout(order, geometry.groups[0].planes, layers, pages, tokens)
    return Pool(geometry, layout, [_flat(buffer)], [buffer.data_ptr()], tokens, dtype)


def _states(host: Any, config: Any) -> Pool:
    """Recurrent and convolution states: a slot is one snapshot of this rank's share of all layers."""
    if host.layout not in _RECORDS:
        raise _refused(host, f"allowed layouts of states: {', '.join(sorted(_RECORDS))}")
    if getattr(host, "slot_state_buffers", ()):
        raise _refused(host, "it keeps side states, whose addresses it does not tell")
    named = [("temporal", host.temporal_buffer)]
    named += [(f"conv-{number}", buffer) for number, buffer in enumerate(host.conv_buffer)]
    shares = config.tp_size
    return _records(
        host, [one for one in named if one[1].numel()], int(host.num_mamba_layers), 1, shares,
        Split(tp=shares), Rank(config.tp_rank),
    )  # fmt: skip


def _indexer(host: Any) -> Pool:
    """Keys of a sparse-attention indexer with their scales, page by page; every tensor rank has the same."""
    if host.layout not in _RECORDS:
        raise _refused(host, f"allowed layouts of indexers: {', '.join(sorted(_RECORDS))}")
    named = [("index", host.index_k_with_scale_buffer)]
    pool = _records(host, named, int(host.layer_num), int(host.page_size), 1, Split(), Rank())
    pool.named = {"page": str(pool.page_slots)}  # of how many tokens a record is
    return pool


def _records(
    host: Any, named: Sequence[tuple[str, torch.Tensor]], layers: int, page_slots: int, shares: int, split: Split,
    rank: Rank,
) -> Pool:  # fmt: skip
    """Buffers [pages, layers, …], each dense: a record a page and layer. A rank's share counts as one head."""
    pages = {int(buffer.shape[0]) for _, buffer in named}
    if len(pages) != 1 or any(int(buffer.shape[1]) != layers for _, buffer in named):
        raise _refused(host, f"its buffers are {[tuple(buffer.shape) for _, buffer in named]}")
    count = pages.pop()

    def planes(heads: int) -> tuple[Plane, ...]:
        return tuple(
            Plane(name, heads, buffer.numel() // (count * layers), _dtype(buffer.dtype))
            for name, buffer in named
        )

    geometry = Geometry([Group(Rule.FULL, tuple(range(layers)), planes(shares))], layers)
    layout = PagedLayout("BLPHND", planes(1), layers, count, 1, separate="P", first_head=rank.tp)
    return Pool(
        geometry, layout, [_flat(buffer) for _, buffer in named], [buffer.data_ptr() for _, buffer in named],
        page_slots, _dtype(named[0][1].dtype), split, rank,
    )  # fmt: skip


def _check(host: Any, pool: Pool) -> None:
    """Whether the pool's own addresses and sizes of its first and its last page are those of the description."""
    pages = (0, pool.layout.blocks - 1)
    slots = torch.cat([torch.arange(pool.page_slots) + page * pool.page_slots for page in pages])
    try:
        pointers, sizes = host.get_page_buffer_meta(slots)
    except (NotImplementedError, ValueError) as error:
        raise _refused(host, str(error)) from error
    told = list(zip(map(int, pointers), map(int, sizes), strict=False))
    if len(pointers) != len(sizes) or told != [piece for page in pages for piece in pool.pieces(page)]:
        raise _refused(host, "its pages are not where its layout says")
