import jax
import jax.numpy as jnp
import pytest

from levanter_infer.decode.programs import Program


def test_a_program_is_compiled_once_and_says_so():
    program = Program(lambda x: x + 1)
    assert not program.is_begun and program.compilations == 0
    assert [int(program(jnp.int32(x))) for x in (1, 2)] == [2, 3]
    assert program.is_begun and program.compilations == 1


def test_options_that_the_compiler_does_not_know_are_left_out_and_the_others_apply():
    options = {"xla_not_an_option": True, "xla_backend_optimization_level": "1"}
    assert int(Program(lambda x: x + 1, options=options)(jnp.int32(1))) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_backend_optimization_level, 'first'"):
        Program(lambda x: x + 1, options={**options, "xla_backend_optimization_level": "first"})(jnp.int32(1))


def test_an_option_that_is_required_is_not_left_out():
    options = {"xla_not_an_option": True}
    with pytest.raises(ValueError, match="needs XLA's option xla_not_an_option, which this jaxlib does not know"):
        Program(lambda x: x + 1, options=options, required=options)(jnp.int32(1))
