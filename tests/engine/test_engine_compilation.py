"""The cache of compiled programs: shared, bounded, cleared, and dropped with its owners."""

import gc
import weakref

import linear
import optax
import toy
from compiled import compilations

import fedjax_peft as fp
from fedjax_peft.engine import compilation
from fedjax_peft.engine.compilation import Programs


class Compiled:
    """A program for tests: any object that can be referred to weakly."""


def owner():
    return lambda: None


def keys_of(programs, one):
    """Returns which of the keys 0 to 9 are kept for an owner."""
    return [key for key in range(10) if programs.known(one, key)]


def test_a_program_is_made_once_for_each_owner_and_key():
    programs, a, b = Programs(bound=8), owner(), owner()
    first = programs.get(a, 1, Compiled)
    assert programs.get(a, 1, Compiled) is first
    others = [programs.get(a, 2, Compiled), programs.get(b, 1, Compiled)]
    assert first not in others
    assert programs.of(a) == [first, others[0]]
    assert len(programs) == 3


def test_the_programs_that_were_used_last_are_kept():
    programs, a, b = Programs(bound=3), owner(), owner()
    for one, key in ((a, 1), (a, 2), (b, 3), (a, 1), (a, 4)):
        programs.get(one, key, Compiled)
    assert (keys_of(programs, a), keys_of(programs, b)) == ([1, 4], [3])


def test_programs_can_be_cleared_for_one_owner_or_all():
    programs, a, b = Programs(bound=8), owner(), owner()
    for one, key in ((a, 1), (b, 2), (b, 3)):
        programs.get(one, key, Compiled)
    programs.clear(b)
    assert (keys_of(programs, a), keys_of(programs, b)) == ([1], [])
    programs.clear()
    assert len(programs) == 0


def test_programs_are_dropped_with_their_owner_at_once():
    programs, a, b = Programs(bound=8), owner(), owner()
    gone = [weakref.ref(programs.get(a, key, Compiled)) for key in (1, 2)]
    kept = programs.get(b, 1, Compiled)
    del a
    assert [ref() for ref in gone] == [None, None]
    assert programs.of(b) == [kept]
    assert len(programs) == 1


def test_nothing_is_kept_for_an_owner_without_weak_references():
    programs = Programs(bound=8)
    assert programs.get(1.5, "key", Compiled) is not programs.get(1.5, "key", Compiled)
    assert not programs.known(1.5, "key")
    assert len(programs) == 0


def test_sessions_share_programs_until_they_are_cleared_or_the_model_is_dropped():
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))

    def step(model):
        session = fp.session(model, algorithm, toy.clients([4, 6]), batch_size=2)
        session.step(session.init(0))
        return weakref.ref(compilation.programs.of(model.apply)[0])

    model = linear.model()
    step(model)
    compilations.clear()
    step(model)
    assert not compilations
    assert len(compilation.programs.of(model.apply)) == 1
    compilation.programs.clear(model.apply)
    compiled = step(model)
    assert compilations
    assert compiled() is not None
    del model
    gc.collect()
    assert compiled() is None
