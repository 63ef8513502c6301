"""The table of attention kernels, and the choice of the first that fits a model.

A new kernel is a row of `KERNELS` and a name in `types.Kernel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, get_args

import attrs
import torch
from torch import Tensor

from trainkit.attention.blocks import attend_spans, flash_takes, matmul
from trainkit.attention.flex import flex
from trainkit.attention.inputs import check_inputs
from trainkit.attention.sdpa import sdpa
from trainkit.attention.untraced import untraced
from trainkit.attention.varlen import varlen
from trainkit.types import Attend, ConfigError, Kernel, Spans, check_choice


@attrs.frozen(eq=False)
class KernelChoice:
    """A chosen kernel, and the reason why each kernel preferred to it does not fit."""

    name: str
    attend: Attend
    refused: Mapping[str, str]

    def __str__(self) -> str:
        """Return the name, followed by the reasons in parentheses."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        return f"{self.name} ({reasons})" if reasons else self.name


@attrs.frozen
class _Inputs:
    """The queries, keys and values of a model; `head_size` is that of the widest."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    window: int | None
    sinks: bool

    @property
    def dtype_name(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name.replace("bfloat", "bf").replace("float", "fp")

    def __str__(self) -> str:
        return f"{self.dtype_name} and heads of {self.head_size}"

    def make_query(self) -> Tensor:
        # [B, H, S, D]; torch looks at shape, dtype and device alone.
        return torch.empty(1, 1, 16, self.head_size, dtype=self.dtype, device=self.device)


@attrs.frozen(eq=False)
class KernelRow:
    """A row of `KERNELS`: an attention kernel and the inputs that it takes.

    Attributes:
        make: From the inputs of a model to the kernel's `Attend`.
        reject: From the inputs of a model to the reason why the kernel does not take them, or "".
        softcap: Whether the kernel supports soft caps.
        sinks: Whether it supports sinks.
        operators: torch's operators that it consists of, as "namespace::name", whose results
            selective recomputation may save. None where it is compiled or written out.
        module: The module that registers `operators` on CUDA.
    """

    make: Callable[[_Inputs], Attend]
    reject: Callable[[_Inputs], str]
    softcap: bool = False
    sinks: bool = True
    operators: Sequence[str] = ()
    module: str = ""


def choose_kernel(
    names: Sequence[Kernel],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_size: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> KernelChoice:
    """Return the first of some kernels that fits the attention of a model.

    Call it once, when the model is built: the choice does not depend on a batch.

    Args:
        names: Kernels in order of preference; see `types.Kernel`.
        device: The model's device.
        dtype: The dtype of queries, keys and values.
        head_size: The size of the widest heads.
        window: The number of keys that a query attends to at most; None for all.
        softcap: The bound of the scores; None for no bound.
        sinks: Whether heads have sinks.

    Returns:
        The kernel, whose `attend` goes into the model; its text says why no other was chosen.

    Raises:
        ValueError: A name is unknown.
        ConfigError: No kernel fits; the message has the reason for each.

    Examples:
        >>> print(
        ...     choose_kernel(
        ...         ("varlen", "flash", "math"), device="cpu", dtype=torch.float32, head_size=64
        ...     )
        ... )
        flash (varlen: it runs only on CUDA)
        >>> choose_kernel(
        ...     ("varlen", "flash"), device="cpu", dtype=torch.float32, head_size=64, softcap=50.0
        ... )
        Traceback (most recent call last):
        trainkit.types.ConfigError: attention: none of these kernels takes heads of 64 in fp32 on
        cpu with a soft cap of 50.0: varlen: it runs only on CUDA; flash: it has no soft caps:
        ...
    """
    refused: dict[str, str] = {}
    inputs = _Inputs(torch.device(device), dtype, head_size, window, sinks)
    for name in names:
        check_choice(get_args(Kernel), "attention", kernel=name)
        row = KERNELS[name]
        # The kernel's own reasons come before the soft cap.
        reason = row.reject(inputs)
        if not reason and softcap is not None and not row.softcap:
            reason = "it has no soft caps"
        if not reason and sinks and not row.sinks:
            reason = "it gives no log-sum-exp, which sinks need"
        if not reason:
            return KernelChoice(name, row.make(inputs), refused)
        refused[name] = reason
    options = f" in a window of {window}" if window is not None else ""
    options += f" with a soft cap of {softcap}" if softcap is not None else ""
    options += " with sinks" if sinks else ""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise ConfigError(
        f"attention: none of these kernels takes heads of {head_size} in {inputs.dtype_name} on "
        f"{inputs.device.type}{options}: {reasons or 'there are none'}",
        where="attention",
        got=list(names),
        hint="add sdpa or math at the end, which take everything",
    )


def list_operators(device: torch.device) -> list[Any]:
    """Return torch's operators that the kernels of the table consist of.

    Args:
        device: The model's device; some operators are registered on CUDA only.

    Raises:
        AttributeError: This version of torch has no operator of such a name.

    Examples:
        >>> torch.ops.aten._flash_attention_forward in list_operators(torch.device("cpu"))
        False
    """
    operators: dict[str, Any] = {}
    for row in KERNELS.values():
        # The operator never runs there, and importing its module takes a second.
        if row.module and device.type != "cuda":
            continue
        if row.module:
            import_module(row.module)
        for name in row.operators:
            namespace, _, operator = name.partition("::")
            operators[name] = getattr(getattr(torch.ops, namespace), operator)
    return list(operators.values())


# ------------------------------------------------------------------------------- rows of the table


def _take_all(_: _Inputs) -> str:
    return ""


def _reject_varlen(inputs: _Inputs) -> str:
    if inputs.device.type != "cuda":
        return "it runs only on CUDA"
    if flash_takes(inputs.make_query()):
        return ""
    return (
        f"it takes fp16 and bf16, and heads that 8 divides up to 256, from Ampere on, not {inputs}"
    )


def _reject_flex(inputs: _Inputs) -> str:
    if inputs.device.type == "cpu":
        return "torch has no backward pass of it for a CPU"
    if inputs.device.type != "cuda":
        return "it runs only on CUDA"
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    # Its Triton kernel multiplies tiles of 16 and more.
    if inputs.dtype in dtypes and inputs.head_size >= 16:
        return ""
    return f"it takes fp32, fp16 and bf16, and heads of 16 and more, not {inputs}"


def _reject_flash(inputs: _Inputs) -> str:
    # torch's flash for CPUs takes all dtypes, head sizes and masks.
    if inputs.device.type == "cpu":
        return ""
    # It will be `varlen`, see `_make_flash`.
    if _is_varlen(inputs):
        return _reject_varlen(inputs)
    return _reject_backend(inputs, "flash", "FLASH_ATTENTION")


def _reject_backend(inputs: _Inputs, name: str, *backends: str) -> str:
    """Return why one kernel of torch's `scaled_dot_product_attention` does not take the inputs."""
    if inputs.device.type != "cuda":
        return "it runs only on CUDA"
    # torch decides by a call's tensors, so it is given short ones. Its last argument is
    # whether key heads are grouped.
    query = inputs.make_query()
    mask = None if inputs.window is None else query.new_zeros(16, 16)
    is_taken = getattr(torch.backends.cuda, f"can_use_{name}_attention")
    with _use_backends(backends):
        params = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, mask is None, False)
        return "" if is_taken(params) else f"torch does not take it here, not {inputs}"


def _is_varlen(inputs: _Inputs) -> bool:
    # On CUDA torch's attention gives flash no mask, and no log-sum-exp to us; its form for packed
    # documents has windows and gives it.
    return inputs.device.type == "cuda" and (inputs.window is not None or inputs.sinks)


def _use_backends(backends: Sequence[str]) -> Any:
    """Return a context that restricts torch's attention to some kernels, in order of preference."""
    # Imported here: it imports torch._dynamo's part of attention, which most runs do not need.
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    return sdpa_kernel([getattr(SDPBackend, name) for name in backends], set_priority=True)


def _make_sdpa(_: _Inputs, *backends: str) -> Attend:
    """Return `sdpa`, restricted to some of torch's kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, spans: Spans, **options: Any) -> Tensor:
        with _use_backends(backends):
            return sdpa(q, k, v, spans=spans, **options)

    return untraced(attend)


def _make_flash(inputs: _Inputs) -> Attend:
    return varlen if _is_varlen(inputs) else _make_sdpa(inputs, "FLASH_ATTENTION")


def _math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    q, k, v, scale = check_inputs(
        q,
        k,
        v,
        spans=spans,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
    )
    return attend_spans(
        q,
        k,
        v,
        spans=spans,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        causal=causal,
        kernel=matmul,
    )


KERNELS: dict[Kernel, KernelRow] = {
    "varlen": KernelRow(
        make=lambda _: varlen,
        reject=_reject_varlen,
        operators=("torch_attn::_varlen_attn",),
        module="torch.nn.attention.varlen",
    ),
    "flash": KernelRow(
        make=_make_flash,
        reject=_reject_flash,
        operators=(
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
        ),
    ),
    "efficient": KernelRow(
        make=lambda inputs: _make_sdpa(inputs, "EFFICIENT_ATTENTION"),
        reject=lambda inputs: _reject_backend(inputs, "efficient", "EFFICIENT_ATTENTION"),
        sinks=False,
        operators=("aten::_scaled_dot_product_efficient_attention",),
    ),
    # cuDNN refuses a document of one token, which the efficient kernel takes.
    "cudnn": KernelRow(
        make=lambda inputs: _make_sdpa(inputs, "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"),
        reject=lambda inputs: _reject_backend(
            inputs, "cudnn", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"
        ),
        sinks=False,
        operators=("aten::_scaled_dot_product_cudnn_attention",),
    ),
    "flex": KernelRow(make=lambda _: flex(), reject=_reject_flex, softcap=True),
    # Its operator is torch's attention on accelerators other than CUDA.
    "sdpa": KernelRow(
        make=lambda _: sdpa,
        reject=_take_all,
        softcap=True,
        operators=("aten::_scaled_dot_product_fused_attention_overrideable",),
    ),
    "math": KernelRow(make=lambda _: untraced(_math), reject=_take_all, softcap=True),
}
"""The kernels by name."""
