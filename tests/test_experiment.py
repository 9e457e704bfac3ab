"""An experiment is checked when it is made, explains what is wrong in one sentence, and survives every round trip."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.experiment import MAX_WORKER_PARAMETERS
from gdlab.part import bounds_of

LAWS = st.one_of(
    st.none(), st.builds(gd.Constant, st.floats(0, 9)), st.builds(gd.Exponential, st.floats(0.001, 9)),
    st.builds(gd.ShiftedExponential, st.floats(0, 9), st.floats(0.001, 9)),
    st.builds(gd.Pareto, st.floats(0.01, 1), st.floats(0.5, 9)), st.builds(gd.Spike))
STRATEGIES = st.one_of(
    st.just(gd.Sync()), st.just(gd.Sync(exchange="server")), st.builds(gd.LocalSGD, st.integers(1, 100)),
    st.builds(gd.Async, st.none() | st.integers(0, 9), st.integers(1, 9), st.sampled_from(["none", "inverse"])))
PROBLEMS = st.one_of(
    st.builds(gd.Digits, st.sampled_from(["logistic", "mlp", "cnn"])), st.just(gd.Ravine()), st.just(gd.Cliff()),
    st.builds(gd.LinearRegression, st.integers(1, 9)), st.just(gd.Torch("package.module:function")),
    st.integers(1, 4).flatmap(lambda n: st.builds(
        gd.Quadratic, st.tuples(*[st.floats(-9, 9)] * n), st.tuples(*[st.floats(-9, 9)] * n))))
PRECISIONS = st.one_of(
    st.sampled_from(["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mixed_fp16", "mixed_bf16"]),
    st.builds(gd.Precision, st.sampled_from(["fp16", "Float(5, 2)"]), rounding=st.just("stochastic"),
              loss_scale=st.sampled_from([None, "dynamic", 1024.0])),
    st.builds(gd.Precision, compensated=st.booleans()))
CLIPS = st.one_of(st.none(), st.floats(0.001, 100), st.builds(gd.Clip, value=st.floats(0.1, 9)),
                  st.builds(gd.Clip, adaptive=st.floats(0.1, 9), where=st.just("average")))

COMPRESSIONS = st.one_of(
    st.none(), st.sampled_from(["topk", "sign", "fp8", "bf16"]),
    st.builds(gd.Compression, st.sampled_from(["topk", "sign", "fp8", "bf16"]), st.floats(0.001, 1), st.booleans(),
              st.sampled_from(["auto", "mean", "one"])))


@st.composite
def experiments(draw):
    workers = draw(st.integers(1, 5))
    return gd.Experiment(
        workers=workers, problem=draw(PROBLEMS), strategy=draw(STRATEGIES), compute_time=draw(LAWS),
        speeds=draw(st.none() | st.tuples(*[st.floats(0.01, 10)] * workers)),
        precision=draw(PRECISIONS), clip=draw(CLIPS), compression=draw(COMPRESSIONS),
        seed=draw(st.integers(0, 2**63 - 1)),
        optimizer=draw(st.builds(gd.SGD, st.floats(0, 10), st.floats(0, 0.99)) | st.just(gd.AdamW(0.01))),
        batch_size=draw(st.none() | st.integers(1, 99)), seconds=draw(st.none() | st.floats(0.1, 99)),
        network=draw(st.builds(gd.Network, st.floats(0, 1))))


@given(experiments())
def test_an_experiment_survives_json_and_the_url_query(experiment):
    assert gd.Experiment.from_json(experiment.to_json()) == experiment
    assert gd.Experiment.from_query(experiment.to_query()) == experiment
    assert gd.Experiment.from_query("?" + experiment.to_query() + "&voila-theme=dark") == experiment
    assert experiment.replace() == experiment and hash(experiment.replace()) == hash(experiment)


def test_the_defaults_need_no_link_and_rows_survive_it():
    assert gd.Experiment().to_query() == ""
    for problem in (gd.Quadratic(centers=((0.0, 1.0),)), gd.Quadratic(eigenvalues=((1.0,),), start=(1.0,))):
        one = gd.Experiment(workers=1, problem=problem)
        assert gd.Experiment.from_query(one.to_query()) == one


@pytest.mark.parametrize("field", ["workers", "updates", "batch_size", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, "abc", 10**30, math.nan, math.inf, True, [], {}])
def test_a_whole_number_out_of_place_gets_one_sentence_that_names_it(field, value):
    with pytest.raises(gd.ExperimentError) as caught:
        gd.Experiment(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field} = ") and message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, "fast", None, 1e9])
def test_a_learning_rate_out_of_place_gets_one_sentence_that_names_it(value):
    with pytest.raises(gd.ExperimentError, match=r"^lr = .* it must be a (finite )?number from 0 to 1,000,000"):
        gd.SGD(lr=value)


@pytest.mark.parametrize(("given_", "says"), [
    ({"wrokers": 3}, "did you mean workers?"),
    ({"strategy": "gossip"}, "must be one of Sync, Async, LocalSGD"),
    ({"problem": "mnist"}, "Quadratic, Ravine"),
    ({"precision": "fp9"}, "mixed_bf16"),
    ({"clip": -1}, "norm = -1"),
    ({"compression": "zip"}, "must be one of topk, sign, fp8, bf16"),
    ({"compression": {"kind": "Compression", "fraction": 0}}, "compression: fraction = 0"),
    ({"updates": None}, "needs an end"),
    ({"speeds": (1, 1)}, "2 speeds but workers = 4"),
    ({"shards": (0.5, 0.5)}, "2 shards but workers = 4"),
    ({"shards": (0.5, 0.5, 0.5, 0.5)}, "their sum 1"),
    ({"problem": gd.Quadratic(centers=((0, 0), (1, 1)))}, "2 centers but workers = 4"),
    ({"problem": gd.Quadratic(eigenvalues=((1, 1), (1, 1)))}, "2 rows of eigenvalues but workers = 4"),
    ({"strategy": gd.Sync(1)}, 'exchange="server"'),
    ({"strategy": gd.Sync(4, "server")}, "at most 3"),
    ({"global_batch": 3}, "at least one sample a worker"),
    ({"strategy": {"kind": "Async", "batch": 0}}, "strategy: batch = 0"),
    ({"workers": 0, "seed": -1}, "1 more"),
])
def test_what_cannot_be_is_said_in_one_sentence(given_, says):
    with pytest.raises(gd.ExperimentError) as caught:
        gd.Experiment(**given_)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("query", [
    "workers=0", "workers=abc", "workers=4,4", "wrokers=4", "strategy=Gossip", "strategy=Async&strategy.foo=3",
    "strategy.batch=2", "optimizer.lr=nan", "self=1", "cls=1", "args=1", "data=1", "problem.self=1",
    "strategy.cls=1", "%%%=&&&", "precision=fp32&precision.compute=fp16", "clip=-1", "speeds=1,1",
    "compression=zip", "compression=topk&compression.method=sign&compression.foo=1", "compression.fraction=0",
])
def test_a_bad_link_gets_one_sentence(query):
    with pytest.raises(gd.ExperimentError) as caught:
        gd.Experiment.from_query(query)
    assert str(caught.value).endswith((".", "?")) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"workers": 0}', '{"nope": 1}', "null"])
def test_bad_json_gets_one_sentence(text):
    with pytest.raises(gd.ExperimentError):
        gd.Experiment.from_json(text)


@pytest.mark.parametrize("name", ["self", "cls", "args", "data", "changes", "__class__", "_payload", "", "kind"])
def test_no_name_in_json_is_taken_for_python_s_own(name):
    value = "Nothing"
    for data in ({name: value}, {"problem": {"kind": "Torch", "factory": "a:b", name: value}},
                 {"strategy": {"kind": "Async", name: value}}, {"compute_time": {"kind": "Pareto", name: value}}):
        with pytest.raises(gd.ExperimentError):
            gd.Experiment.from_json(json.dumps(data))
    for part in (gd.Experiment(), gd.Quadratic(), gd.Torch("a:b"), gd.Exponential()):
        with pytest.raises(gd.ExperimentError):
            part.replace(**{name: value})


@pytest.mark.parametrize("depth", [10, 300, 900, 1100, 100_000])
@pytest.mark.parametrize("nest", [
    '{"workers": %s1%s}', '{"problem": %s1%s}', '{"problem": {"kind": "Torch", "factory": %s1%s}}', '{"speeds": %s1%s}',
    '{"precision": %s1%s}', "%s1%s"])
def test_json_however_deep_gets_one_sentence(nest, depth):
    for left, right in (("[", "]"), ('{"problem":', "}"), ('{"kind":', "}")):
        with pytest.raises(gd.ExperimentError) as caught:
            gd.Experiment.from_json(nest % (left * depth, right * depth))
        assert "\n" not in str(caught.value)


def test_fields_are_normalised():
    made = gd.Experiment(strategy="async", clip=2, compute_time=0.05, precision="mixed_fp16", problem="ravine")
    assert made.strategy == gd.Async() and made.clip == gd.Clip(norm=2.0) and made.compute_time == gd.Constant(0.05)
    assert made.precision == gd.Precision(compute="fp16", loss_scale="dynamic") and made.problem == gd.Ravine()
    assert made.precision.name == "mixed_fp16"


def test_an_experiment_is_frozen_and_replace_checks():
    made = gd.Experiment()
    with pytest.raises(ValueError, match="frozen"):
        made.workers = 3
    with pytest.raises(gd.ExperimentError, match="workers"):
        made.replace(workers=0)
    assert made.replace(workers=8).workers == 8 and made.workers == 4


def test_a_global_batch_is_shared_out_whole():
    sizes = gd.Experiment(workers=4, global_batch=10).batch_sizes
    assert sizes == (3, 3, 2, 2) and gd.Experiment(workers=3).batch_sizes == (32, 32, 32)


def test_a_slower_worker_draws_the_same_times_stretched():
    plain = gd.Experiment(compute_time=gd.Exponential(0.05))
    slowed = plain.replace(speeds=(1, 1, 1, 0.25), strategy="async", seed=0)
    for step in range(130):
        assert slowed.times.draw(3, step) == 4 * plain.times.draw(3, step)
        assert slowed.times.draw(0, step) == plain.times.draw(0, step)


def test_a_function_from_a_cell_travels_beside_the_json():
    def factory():
        return None

    made = gd.Experiment(problem=factory)
    assert made.payload and made.problem.name == "factory"
    assert gd.Experiment(problem=gd.Torch(factory)) == made
    assert made.replace(workers=2).payload == made.payload
    again = gd.Experiment.from_json(made.to_json())
    assert again == made and again.payload is None
    assert gd.Experiment.from_json(made.to_json(), made.payload).payload == made.payload


def test_every_field_says_what_it_is_once():
    for name, field in gd.Experiment.model_fields.items():
        assert field.description and field.json_schema_extra["label"], name
    assert bounds_of(gd.Experiment.model_fields["workers"]) == {"ge": 1, "le": 100_000}


@pytest.mark.parametrize("problem", [
    gd.Quadratic((1.0,) * 10_000, (1.0,) * 10_000), gd.LinearRegression(features=1000)], ids=lambda p: p.kind)
def test_workers_times_parameters_that_no_machine_holds_are_refused(problem):
    size = 10_000 if problem.kind == "Quadratic" else 1000
    assert gd.Experiment(problem, workers=MAX_WORKER_PARAMETERS // size).workers
    with pytest.raises(gd.ExperimentError, match=rf"with {size:,} parameters each are too many.*at most 50,000,000\.$"):
        gd.Experiment(problem, workers=MAX_WORKER_PARAMETERS // size + 1)
