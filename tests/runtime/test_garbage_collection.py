import gc

import pytest

from levanter_infer.runtime.garbage_collection import gc_disabled


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(was_on):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_disabled():
            assert not gc.isenabled()
            with gc_disabled():
                pass
            assert not gc.isenabled(), "the inner one leaves the outer one alone"
            raise KeyError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
