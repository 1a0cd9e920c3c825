"""Handles of a role in this process are finished when they are returned."""

from postgrad.core.process import done


def test_a_finished_handle_gives_its_value_as_often_as_it_is_asked() -> None:
    handle = done({"loss": 0.5})
    assert handle.done()
    assert handle.result() == {"loss": 0.5}
    assert handle.result() is handle.result()
