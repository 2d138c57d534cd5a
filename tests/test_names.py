"""Names that users look for at the top of the package lead to the rooms where they lie."""

import pytest

import mpkernels


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("AdamW", "optim"),
        ("GradScaler", "amp"),
        ("find_nonfinite", "amp"),
        ("fuse", "nn"),
        ("linear_act", "functional"),
    ],
)
def test_a_name_of_a_room_is_found_at_the_top(name, room):
    assert getattr(mpkernels, name) is getattr(getattr(mpkernels, room), name)


def test_an_unknown_name_is_refused_as_python_does():
    with pytest.raises(AttributeError, match="module 'mpkernels' has no attribute 'Adamw'") as raised:
        mpkernels.Adamw  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("Adamw", mpkernels)  # Python suggests a name from these
