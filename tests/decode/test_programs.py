import jax.numpy as jnp

from levanter_infer.decode.programs import Program


def test_a_program_is_compiled_once_and_says_so():
    program = Program(lambda x: x + 1)
    assert not program.is_begun and program.compilations == 0
    assert [int(program(jnp.int32(x))) for x in (1, 2)] == [2, 3]
    assert program.is_begun and program.compilations == 1
