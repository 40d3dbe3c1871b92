"""scripts/tpu/float_code.py against texts of programs."""

from scripts.tpu.float_code import added_floats, float_code

LOOP = """
%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}}

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %p = (s32[], f32[8,128]) parameter(0)
  %x.{n} = f32[8,128]{{1,0:T(8,128){space}}} get-tuple-element(%p), index=1
  %y.{n} = f32[8,128]{{1,0:T(8,128)}} multiply(%x.{n}, %x.{n}), backend_config={{"window_config":{{"output_window_bounds":["{tile}","1"]}}}}
  %z.{n} = f32[8,128]{{1,0:T(8,128)}} {collective}(%y.{n}), to_apply=%sum
  ROOT %t = (s32[], f32[8,128]) tuple(%x.{n}, %z.{n})
}}

ENTRY %main (q: f32[8,128]) -> f32[8,128] {{
  %w = (s32[], f32[8,128]) while(%q), condition=%cond, body=%body, metadata={{op_name="jit(f)/forward_256/while"}}
}}
"""  # noqa: E501


def text(n=1, space="", tile=1, collective="all-gather"):
    return LOOP.format(n=n, space=space, tile=tile, collective=collective)


def test_names_and_memory_spaces_are_left_out_and_tiles_are_not():
    code = float_code(text(), "forward_256")
    assert sum(code.values()) == 2
    assert float_code(text(n=7, space="S(1)"), "forward_256") == code
    assert float_code(text(tile=2), "forward_256") != code


def test_collectives_that_add_floats_are_found():
    assert added_floats(text()) == []
    assert len(added_floats(text(collective="all-reduce"))) == 1
