"""The Triton kernel: its sums in Triton's interpreter, its machine code for GPUs that are not here, what torch.compile
makes of it; and, where there is one, a GPU."""

import re
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops import triton_kernel_wrap
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import generate
import speculate
from eight_bit import FEW_ROWS, EightBitLinear, dequantised, quantised

triton = pytest.importorskip("triton")
gpu_kernels = pytest.importorskip("gpu_kernels")

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = {  # inputs, outputs, inputs that share a scale
    "one scale an output": (192, 80, 192),
    "fewer outputs than a program takes": (64, 5, 64),
    "groups": (256, 48, 32),
    "blocks, the last one cut off": (320, 48, 128),
}


def made(codes: str, n_in: int, n_out: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and another scale for each group."""
    torch.manual_seed(0)
    weight, scale = quantised(torch.randn(n_out, n_in), CODES[codes])
    return weight, scale * (torch.rand(n_out, -(-n_in // group)) + 0.5)


def interpreted(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """What few_rows launches, on a CPU."""
    from triton.runtime.interpreter import InterpretedFunction

    kernel, y = InterpretedFunction(gpu_kernels.multiply.fn.fn), x.new_full((x.size(0), codes.size(0)), torch.nan)
    kernel[(triton.cdiv(codes.size(0), 16),)](
        x, codes, scale, y, x.size(0), *codes.shape, group, scale.size(1),
        ROWS=gpu_kernels.TILE, STEP=gpu_kernels.step(group), OUTPUTS=16,
    )  # fmt: skip
    return y


@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", CODES)
def test_the_kernel_is_the_product_with_what_the_codes_stand_for(codes, shape, rows):
    """In float16: the interpreter multiplies no bfloat16."""
    n_in, n_out, group = SHAPES[shape]
    weight, scale = made(codes, n_in, n_out, group)
    x = torch.randn(rows, n_in).half()
    want = F.linear(x.double(), dequantised(weight, scale, group).double())
    rounding = torch.finfo(x.dtype).eps / 2  # once, at the end; sums are fp32
    assert ((interpreted(x, weight, scale, group) - want).abs() <= rounding * want.abs() + 1e-4).all()


@pytest.mark.parametrize("config", gpu_kernels.multiply.configs, ids=str)
@pytest.mark.parametrize(
    ("codes", "capability", "group"),
    [("int8", 80, 4096), ("int8", 90, 576), ("fp8", 89, 128), ("fp8", 90, 576), ("fp8", 100, 4096)],
)
def test_machine_code_copies_codes_as_they_are_and_multiplies_on_tensor_cores(
    codes, capability, group, config, tmp_path
):
    from triton.backends.compiler import GPUTarget

    names, sizes = gpu_kernels.multiply.fn.arg_names, {"ROWS": 16, "STEP": gpu_kernels.step(group), **config.kwargs}
    pointers = {"x": "*bf16", "codes": {"int8": "*i8", "fp8": "*fp8e4nv"}[codes], "scale": "*fp32", "y": "*bf16"}
    types = {name: pointers.get(name, "constexpr" if name in sizes else "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, "n_out", "n_in")}
    source = triton.compiler.ASTSource(gpu_kernels.multiply.fn, types, sizes, aligned)
    stages, warps = config.num_stages, config.num_warps
    options = {"num_warps": warps, "num_stages": stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert re.search(r"mma\.\S*bf16", ptx)
    sizes_copied = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", ptx)
    copied = 32 * warps * sum(int(size, 16) for size in sizes_copied)
    ahead = stages * sizes["STEP"] * (2 * 16 + sizes["OUTPUTS"])  # bytes: of rows two a value, of codes one
    assert copied == ahead or (sizes["STEP"] < 256 and copied >= ahead)  # small pieces are copied more than once
    (tmp_path / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (\w+)", ptx)[1]
    tools = triton.knobs.nvidia
    command = [
        (tools.ptxas if capability < 100 else tools.ptxas_blackwell).path,
        "-v",
        f"--gpu-name={target}",
        "kernel.ptx",
        "-o",
        "kernel.cubin",
    ]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores" in said


class Here:
    """A driver that says which GPU to compile for, and has none."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


def test_torch_compile_sees_the_kernel_and_that_it_writes_its_result_alone(monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", Here())
    seen = []

    def look(graph, inputs):
        seen.extend(node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target))
        return lambda *inputs: (torch.empty(4, 80),)

    backend = lambda graph, inputs: aot_module_simplified(graph, inputs, fw_compiler=look)  # noqa: E731
    weight, scale = made("int8", 192, 80, 64)
    with torch.inference_mode():
        call = torch.compile(lambda x: torch.ops.eagle_fast.few_rows(x, weight, scale, 64), backend=backend)
        call(torch.randn(4, 192).bfloat16())
    (kernel,) = seen
    assert kernel.kwargs["tensors_to_clone"] == ["y"]
    outputs = [config.kwargs["OUTPUTS"] for config in gpu_kernels.multiply.configs]
    assert kernel.kwargs["grid"] == [(-(-80 // size), 1, 1) for size in outputs]
    wanted = {"rows": 4, "n_out": 80, "n_in": 192, "group": 64, "n_group": 3, "ROWS": 16, "STEP": 64}
    constants = triton_kernel_wrap.kernel_side_table.get_constant_args(kernel.kwargs["constant_args_idx"])
    assert {name: value for name, value in (constants | kernel.kwargs["kwargs"]).items() if name in wanted} == wanted


@pytest.mark.parametrize(("rows", "called"), [(1, True), (FEW_ROWS, True), (FEW_ROWS + 1, False)])
@pytest.mark.parametrize("bias", [False, True])
def test_on_cuda_few_rows_go_to_the_kernel_and_many_to_a_product_in_16_bits(bias, rows, called):
    """With tensors that only say where they are."""
    with FakeTensorMode(), torch.device("cuda"), torch.inference_mode():
        linear = EightBitLinear(64, 48, bias, torch.int8, 64)
        x = torch.empty(1, rows, 64)
        assert linear(x).shape == (1, rows, 48)
        code = make_fx(linear)(x).code
        assert ("eagle_fast.few_rows" in code, "aten.add" in code) == (called, bias)


@pytest.mark.parametrize(
    ("codes", "dtype", "group", "capability", "read"),
    [
        ("int8", torch.bfloat16, 4096, (8, 0), True), ("int8", torch.float16, 576, (7, 5), False),
        ("fp8", torch.bfloat16, 128, (8, 9), True), ("fp8", torch.bfloat16, 4096, (8, 6), False),
        ("int8", torch.float32, 4096, (9, 0), False), ("int8", torch.bfloat16, 24, (9, 0), False),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_read_is_held_in_16_bits(codes, dtype, group, capability, read, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    linear = EightBitLinear(8 * group, 16, False, CODES[codes], group)
    assert generate.fast_on(torch.device("cuda"))(linear, dtype) == read
    assert not generate.fast_on(torch.device("mps"))(linear, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", CODES)
def test_a_gpu_computes_the_same(codes, shape, rows):
    if codes == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("held in 16 bits")
    n_in, n_out, group = SHAPES[shape]
    weight, scale = made(codes, n_in, n_out, group)
    x = torch.randn(rows, n_in).bfloat16()
    want = F.linear(x.double(), dequantised(weight, scale, group).double())
    y = torch.ops.eagle_fast.few_rows(x.cuda(), weight.cuda(), scale.cuda(), group).cpu()
    assert ((y - want).abs() <= torch.finfo(x.dtype).eps / 2 * want.abs() + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_replayed_graph_computes_the_same(bias, rows):
    weight, scale = made("int8", 192, 80, 192)
    linear = EightBitLinear(192, 80, bias, torch.int8, 192).cuda()
    linear.weight.copy_(weight)
    linear.scale.copy_(scale)
    if bias:
        linear.bias = torch.nn.Parameter(torch.randn(80, device="cuda", dtype=torch.bfloat16))
    x = torch.empty(1, rows, 192, device="cuda", dtype=torch.bfloat16)
    call = speculate.compile_call(lambda: linear(x), is_cuda=True)
    for _ in range(4):  # compiled, recorded, replayed
        x.normal_()
        want = F.linear(x.double(), dequantised(linear.weight, linear.scale, 192).double(), linear.bias)
        assert ((call() - want).abs() <= 0.02 * want.abs().max()).all()
