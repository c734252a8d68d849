"""The line of the log that says which layers run on fp4gemm."""

from __future__ import annotations

from fp4gemm.integrations.serving.report import Report


def test_numbers_say_which_layers_are_left_where_some_run() -> None:
    """Names that differ in numbers alone are counted together; numbers are shown where they decide."""
    log: list[str] = []
    report = Report(log.append, "vLLM")
    fp8 = (0, 3, 4, 5, 9)
    for i in range(10):
        report.runs(f"model.layers.{i}.self_attn.qkv_proj", "W4A16")
        name = f"model.layers.{i}.mlp.experts"
        if i in fp8:
            assert report.left(name, "its weights are FP8", None) is None
        else:
            report.runs(name, "W4A16")
    report.left("lm_head", "the checkpoint excludes it", None)
    report.ready()
    report.ready()
    assert log == [
        "fp4gemm: W4A16: 10 x model.layers.*.self_attn.qkv_proj, 5 x model.layers.1-2,6-8.mlp.experts; "
        "left to vLLM, its weights are FP8: 5 x model.layers.0,3-5,9.mlp.experts; "
        "left to vLLM, the checkpoint excludes it: lm_head"
    ]
