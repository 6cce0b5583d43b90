"""Tags of modules: what single modules are given, and what copies of them are."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

from torch import nn

from autoamp.modules.tags import TAGS, ModuleTags


def value(tags: ModuleTags[str], module: nn.Module) -> str | None:
    tag = tags.find(module)
    return None if tag is None else tags.values[tag]


def test_the_last_value_counts_until_it_is_taken() -> None:
    tags: ModuleTags[str] = ModuleTags()
    module = nn.Identity()
    assert value(tags, module) is None
    first, second = tags.give(module, "first"), tags.give(module, "second")
    assert value(tags, module) == "second"
    tags.take(second, module)
    assert value(tags, module) == "first"
    tags.take(first, module)
    assert value(tags, module) is None
    assert TAGS not in vars(module)
    assert not tags.values


def test_values_are_taken_in_any_order_and_twice() -> None:
    tags: ModuleTags[str] = ModuleTags()
    module = nn.Identity()
    first, second = tags.give(module, "first"), tags.give(module, "second")
    tags.take(first, module)
    tags.take(first, module)
    assert value(tags, module) == "second"
    assert vars(module)[TAGS] == (second,)


def test_tags_of_two_meanings_do_not_meet() -> None:
    one: ModuleTags[str] = ModuleTags()
    other: ModuleTags[str] = ModuleTags()
    module = nn.Identity()
    tag = one.give(module, "one")
    other.give(module, "other")
    assert (value(one, module), value(other, module)) == ("one", "other")
    one.take(tag, module)
    assert (value(one, module), value(other, module)) == (None, "other")


def test_a_copy_is_given_the_same_for_as_long() -> None:
    tags: ModuleTags[str] = ModuleTags()
    module = nn.Identity()
    tag = tags.give(module, "given")
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert value(tags, copied) == value(tags, pickled) == "given"
    tags.take(tag, module)
    assert value(tags, copied) is value(tags, pickled) is None
    # What the copy still carries means nothing, and is no obstacle to what it is given itself.
    tags.give(copied, "anew")
    assert value(tags, copied) == "anew"


def test_a_module_that_is_gone() -> None:
    tags: ModuleTags[str] = ModuleTags()
    module = nn.Identity()
    tag, reference = tags.give(module, "given"), weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
    tags.take(tag, None)
    assert not tags.values


def test_joined_tags_share_what_was_given_and_will_be() -> None:
    one: ModuleTags[str] = ModuleTags()
    other: ModuleTags[str] = ModuleTags()
    modules = [nn.Identity() for _ in range(3)]
    one.give(modules[0], "a")
    tag = other.give(modules[1], "b")
    one.join(other)
    one.give(modules[2], "c")
    for tags in (one, other):
        assert [value(tags, module) for module in modules] == ["a", "b", "c"]
    one.take(tag, modules[1])
    assert value(other, modules[1]) is None
