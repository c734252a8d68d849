"""The structs of the package and of capi.py, which ctypes passes, against the headers and the library."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import capi
import capi_conversions
import capi_ranks
import capi_training
import pytest
from fp4gemm import _native, _structs

HEADERS = sorted((Path(__file__).parents[2] / "cpp" / "include" / "fp4gemm").glob("*.h"))
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "fp4gemm_quantized": capi.Quantized,
    "fp4gemm_quantize_args": capi.QuantizeArgs,
    "fp4gemm_quantize_searched_args": capi.QuantizeSearchedArgs,
    "fp4gemm_operand": capi.Operand,
    "fp4gemm_vector": _structs.Vector,
    "fp4gemm_gemm_args": capi.GemmArgs,
    "fp4gemm_generated_matrix": _structs.GeneratedMatrix,
    "fp4gemm_generated": capi.Generated,
    "fp4gemm_route_args": capi.RouteArgs,
    "fp4gemm_combine_args": capi.CombineArgs,
    "fp4gemm_cast": capi.Cast,
    "fp4gemm_expert_weights": capi.ExpertWeights,
    "fp4gemm_experts_args": capi.ExpertsArgs,
    "fp4gemm_architecture_info": capi.ArchitectureInfo,
    "fp4gemm_activation_info": capi.ActivationInfo,
    "fp4gemm_kernel_info": capi.KernelInfo,
}
PLAIN = {
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "float": ctypes.c_float,
}


def header() -> str:
    text = "\n".join(each.read_text() for each in HEADERS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def ctype(declared: str) -> Any:
    if declared.endswith("*"):
        return ctypes.c_char_p if declared == "const char*" else ctypes.c_void_p
    if declared in PLAIN:
        return PLAIN[declared]
    return STRUCTS.get(declared.removesuffix("_t"), ctypes.c_int)  # or an enum


def declared_fields(struct: str) -> list[tuple[str, object]]:
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct}_t;", header(), re.DOTALL)
    assert body is not None, struct
    fields = []
    for declaration in body.group(1).split(";"):
        if declaration.strip():
            match = re.fullmatch(r"\s*((?:const )?\w+\*?)\s+([\w,\s]+?)(?:\[(\w+)\])?", declaration)
            assert match is not None, declaration
            kind = ctype(match.group(1))
            if match.group(3) is not None:
                kind *= int(re.search(rf"#define {match.group(3)} (\d+)", header()).group(1))
            fields += [(name.strip(), kind) for name in match.group(2).split(",")]
    return fields


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_have_the_fields_of_the_header(struct: str) -> None:
    assert [tuple(field) for field in STRUCTS[struct]._fields_] == declared_fields(struct)


@pytest.mark.parametrize(
    ("enumerator", "value"),
    [
        ("SUCCESS", capi.SUCCESS),
        ("ERROR_INVALID_ARGUMENT", capi.INVALID_ARGUMENT),
        ("ERROR_NOT_SUPPORTED", capi.NOT_SUPPORTED),
        ("ERROR_WORKSPACE", capi.WORKSPACE),
        ("ERROR_CUDA", capi.CUDA),
        ("ERROR_NOT_LOADED", capi.NOT_LOADED),
        ("BF16", capi.BF16),
        ("FP16", capi.FP16),
        ("FP32", capi.FP32),
        ("FORMAT_NVFP4", capi.FORMAT_NVFP4),
        ("FORMAT_FP16", capi.FORMAT_FP16),
        ("FORMAT_BF16", capi.FORMAT_BF16),
        ("FORMAT_PREPACKED", capi.FORMAT_PREPACKED),
        ("FORMAT_FP32", capi.FORMAT_FP32),
        ("FORMAT_E4M3", capi.FORMAT_E4M3),
        ("FORMAT_PREPACKED_FP8", capi.FORMAT_PREPACKED_FP8),
        ("QUANTIZE_A_NONE", capi.QUANTIZE_A_NONE),
        ("QUANTIZE_A_ROW", capi.QUANTIZE_A_ROW),
        ("QUANTIZE_A_TENSOR", capi.QUANTIZE_A_TENSOR),
        ("QUANTIZE_A_FP8", capi.QUANTIZE_A_FP8),
        ("SCALING_TENSOR", capi.SCALING_TENSOR),
        ("SCALING_ROW", capi.SCALING_ROW),
        ("RAGGED_M", capi.RAGGED_M),
        ("RAGGED_K", capi.RAGGED_K),
        *((f"ACTIVATION_{(name or 'none').upper()}", number) for name, number in capi.ACTIVATIONS.items()),
    ],
)
def test_numbers_are_those_of_the_header(enumerator: str, value: int) -> None:
    match = re.search(rf"\bFP4GEMM_{enumerator} = (\d+)", header())
    assert match is not None
    assert int(match.group(1)) == value


def initialized() -> dict[str, type[ctypes.Structure]]:
    """The structs with a size, by their names in C without the underscores."""
    modules = (capi, capi_ranks, capi_conversions, capi_training)
    values = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    kinds = [kind for kind in values if issubclass(kind, capi.Args) and kind is not capi.Args]
    return {f"fp4gemm{kind.__name__.lower()}": kind for kind in kinds}


def plain(value: object) -> object:
    """A field as numbers, to compare; of a pointer to pointers whether it is null."""
    if isinstance(value, ctypes.Structure):
        return [plain(getattr(value, name)) for name, *_ in value._fields_]
    if isinstance(value, ctypes.Array):
        return [plain(item) for item in value]
    return bool(value) if isinstance(value, ctypes._Pointer) else value


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_macros_set_what_the_structs_here_have(language: str, tmp_path: Path) -> None:
    """Each _INIT macro compiles as C99 and as C++17 without a warning, and gives a struct its defaults."""
    compiler, standard = {"c": ("cc", "-std=c99"), "cpp": ("c++", "-std=c++17")}[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    names = re.findall(r"#define (\w+_ARGS|FP4GEMM_GENERATED)_INIT", header())
    structs = initialized()
    assert sorted(name.replace("_", "").lower() for name in names) == sorted(structs)
    lines = [
        "#include <stdio.h>",
        *(f'#include "fp4gemm/{path.name}"' for path in HEADERS),
        "int main(void) {",
    ]
    for name in names:
        lines += [
            f"  {name.lower()}_t const {name} = {name}_INIT;",
            f"  fwrite(&{name}, sizeof({name}), 1, stdout);",
        ]
    source = tmp_path / f"macros.{language}"
    source.write_text("\n".join([*lines, "  return 0;", "}", ""]))
    command = [compiler, standard, "-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{HEADERS[0].parents[1]}"]
    subprocess.run([*command, source, "-o", tmp_path / "macros"], check=True)
    bytes_of_all = subprocess.run([tmp_path / "macros"], check=True, capture_output=True).stdout
    at = 0
    for name in names:
        struct = structs[name.replace("_", "").lower()]
        assert plain(struct.from_buffer_copy(bytes_of_all, at)) == plain(struct()), name
        at += ctypes.sizeof(struct)
    assert at == len(bytes_of_all)


@pytest.mark.parametrize(
    ("query", "args"),
    [
        ("fp4gemm_gemm_workspace_bytes", capi.GemmArgs(m=-1)),
        ("fp4gemm_quantize", capi.QuantizeArgs(m=-1)),
        ("fp4gemm_quantize_searched", capi.QuantizeSearchedArgs(m=-1)),
    ],
)
def test_the_library_accepts_the_size_of_the_structs(query: str, args: capi.Args) -> None:
    """It goes on to the first wrong field, and refuses a struct of another size."""
    library = capi.core()
    last = ctypes.byref(ctypes.c_size_t()) if query.endswith("bytes") else None
    for size, message in (
        (ctypes.sizeof(args), b"m: is -1"),
        (ctypes.sizeof(args) + 8, b"args: struct_size is"),
    ):
        args.struct_size = size
        assert getattr(library, query)(ctypes.byref(args), 0, last) == capi.INVALID_ARGUMENT
        assert message in library.fp4gemm_last_error()


def test_activations_are_those_of_the_library() -> None:
    library = capi.core()
    rows = capi.activations(library)
    assert {row.name.decode(): row.activation for row in rows} == {
        name or "none": number for name, number in capi.ACTIVATIONS.items()
    }
    assert [row.name for row in rows if row.is_gated] == [
        b"swiglu",
        b"swiglu_oai",
        b"geglu_tanh",
        b"swiglu_limit10",
    ]
    for index in (-1, len(rows)):
        assert library.fp4gemm_activation_info(index, ctypes.byref(capi.ActivationInfo())) != capi.SUCCESS


def test_architectures_are_those_of_the_kernels() -> None:
    """Each architecture has kernels, and the devices that it names are served by them."""
    library = capi.core()
    architectures = capi.architectures(library)
    assert sorted({kernel.arch for kernel in capi.kernels(library)}) == sorted(
        row.arch for row in architectures
    )
    served = {}
    for row in architectures:
        for capability in row.devices.decode().split():
            major, minor = capability.split(".")
            served[10 * int(major) + int(minor)] = row.arch
    for device in range(60, 140):
        assert library.fp4gemm_kernel_arch(device) == served.get(device, -1)
    for index in (-1, len(architectures)):
        info = capi.ArchitectureInfo()
        assert library.fp4gemm_architecture_info(index, ctypes.byref(info)) == capi.INVALID_ARGUMENT


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, open_library, signatures in (
        (_native.CORE_LIBRARY, _native.core, "_SIGNATURES"),
        (_native.TORCH_LIBRARY, _native.torch_library, "_TORCH_SIGNATURES"),
    ):
        known = getattr(_native, signatures)
        monkeypatch.setattr(_native, signatures, {**known, "fp4gemm_of_tomorrow": (ctypes.c_int, [])})
        text = (
            f"{re.escape(name)} has no function fp4gemm_of_tomorrow, must be the library that was built with"
        )
        with pytest.raises(ImportError, match=text):
            open_library.__wrapped__()
