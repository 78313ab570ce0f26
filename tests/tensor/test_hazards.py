"""What PyTorch lets corrupt or crash a tensor without storage: it works, or raises by name."""

import copy
import io
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import mcftensor as mcf
from support.helpers import assert_same_terms, exact, parameter, requires_cuda, sample, small_model


def saved(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def copies(x):
    return {
        "deepcopy": copy.deepcopy(x),
        "copy": copy.copy(x),
        "pickle": pickle.loads(pickle.dumps(x)),
        "save": saved(x),
    }


def assert_same_model(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.role == q.role == "parameter"
        assert isinstance(p, nn.Parameter)
        assert_same_terms(p.detach(), q.detach())


class TestMemory:
    @pytest.mark.parametrize(
        "view", [lambda x: x, lambda x: x[1:], lambda x: x.T, lambda x: x[:, 1], lambda x: x[:0]]
    )
    def test_copies_of_views(self, view, format):
        x = view(sample(format, 3, 4))
        for name, y in copies(x).items():
            assert_same_terms(x, y)
            assert y.role == "value"
            if x.numel():
                shares = y.components[0].data_ptr() == x.components[0].data_ptr()
                assert shares == (name == "copy")

    def test_files_can_be_loaded_with_a_function_that_places_storages(self, format):
        buffer = io.BytesIO()
        torch.save(parameter(format, 3), buffer)
        buffer.seek(0)
        p = torch.load(buffer, map_location=lambda storage, place: storage, weights_only=True)
        assert_same_terms(p.detach(), parameter(format, 3).detach())

    def test_a_storage_is_refused_with_advice(self):
        safetensors = pytest.importorskip("safetensors.torch")
        with pytest.raises(TypeError, match=r"bf16x2 of shape \(3,\) has none.*store_as_terms"):
            safetensors.save({"x": sample(mcf.bf16x2, 3)})

    def test_attributes_of_users_stay(self):
        p = parameter(mcf.bf16x2, 3)
        p.note = "tied"
        assert {q.note for q in copies(p).values()} == {"tied"}

    def test_copies_of_parameters(self, format):
        p = parameter(format, 3, 4)
        for q in copies(p).values():
            assert isinstance(q, nn.Parameter)
            assert (q.role, q.requires_grad) == ("parameter", True)
            assert_same_terms(p.detach(), q.detach())

    @pytest.mark.parametrize(
        ("name", "access"),
        [
            ("set_", lambda x: x.set_(torch.ones(4))),
            ("set_", lambda x: torch.ones(4, dtype=torch.bfloat16).set_(x)),
            ("set_", lambda x: x.__setstate__((torch.ones(4).untyped_storage(), 0, (4,), (1,)))),
            ("apply_", lambda x: x.apply_(abs)),
            ("map_", lambda x: x.map_(x, max)),
            ("dlpack", torch.from_dlpack),
            ("dlpack", np.from_dlpack),
            ("view.*components", lambda x: x.view(torch.int16)),
            ("view.*as_plain", lambda x: x.view(torch.float32)),
            ("resize_.*shape", lambda x: x.resize_(2)),
            ("resize_as_.*shape", lambda x: x.resize_as_(torch.ones(5))),
            ("out of bounds", lambda x: x.as_strided((8,), (1,))),
            ("not allocated", lambda x: list(x.untyped_storage())),
            ("buffer protocol", lambda x: torch.frombuffer(x, dtype=torch.int16)),
            ("np.ndarray", torch.from_numpy),
        ],
        ids=range(15),
    )
    def test_access_to_a_storage_raises_and_changes_nothing(self, name, access):
        x = sample(mcf.bf16x2, 4)
        before = x.clone()
        with pytest.raises((TypeError, NotImplementedError, RuntimeError, ValueError), match=name):
            access(x)
        assert x.shape == x.components[0].shape == (4,)
        assert_same_terms(x, before)

    def test_arrays_are_copies_of_the_values(self):
        x = sample(mcf.bf16x2, 4)
        for array in (x.numpy(), np.asarray(x), np.array(x), x.__array__()):
            assert array.dtype == np.float64
            assert array.tolist() == exact(x).tolist()
        assert np.asarray(x, dtype=np.float32).dtype == np.float32

    def test_new_tensors_keep_the_numbers_whole(self, format):
        for x in (sample(format, 2), parameter(format, 2)):
            y = x.new_tensor([0.1, 0.2])
            assert (y.format, y.role, y.requires_grad) == (format, x.role, False)
            expected = mcf.as_expansion(torch.tensor([0.1, 0.2], dtype=torch.float64), format)
            assert_same_terms(y, expected)
            assert type(x.new_tensor([1, 2], dtype=torch.int64)) is torch.Tensor

    def test_sharing(self):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        assert model.share_memory() is model
        assert all(p.is_shared() for p in model.parameters())
        assert_same_model(model, before)

    @pytest.mark.parametrize("device", [requires_cuda])
    def test_pinned_memory_and_streams(self, format, device):
        x = sample(format, 5)
        pinned = x.pin_memory()
        assert pinned.is_pinned()
        assert all(term.is_pinned() for term in pinned.components)
        y = pinned.to(device, non_blocking=True)
        y.record_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        assert_same_terms(y.cpu(), x)


class TestAutograd:
    def test_hooks_and_retained_gradients(self):
        x, p = sample(mcf.bf16x2, 4).requires_grad_(), parameter(mcf.bf16x2, 4)
        for leaf, kind in ((x, mcf.MCFTensor), (p, torch.Tensor)):
            seen = []
            result = leaf * 2
            result.retain_grad()
            result.register_hook(lambda g, seen=seen: seen.append(type(g)))
            leaf.register_hook(lambda g, seen=seen: seen.append(type(g)))
            result.sum().backward()
            assert seen == [kind, kind]
            assert type(result.grad) is type(leaf.grad) is kind
            assert leaf.grad.tolist() == [2] * 4

    def test_detaching_in_place(self):
        y = parameter(mcf.bf16x2, 4) * 2
        before = y.detach().clone()
        assert y.detach_() is y
        assert y.grad_fn is None
        assert_same_terms(y, before)

    def test_a_parameter_of_a_parameter(self):
        p = parameter(mcf.bf16x3, 4)
        q = nn.Parameter(p, requires_grad=False)
        assert isinstance(q, nn.Parameter)
        assert q.role == "parameter"
        assert q.components[2].data_ptr() == p.components[2].data_ptr()


class TestExchange:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_data_of_a_plain_tensor_is_refused(self, format, dtype):
        p = parameter(format, 4)
        before = p.detach().clone()
        with pytest.raises(TypeError, match=r"data:.*copy_\(\)"):
            p.data = torch.ones(4, dtype=dtype)
        assert_same_terms(p.detach(), before)

    @pytest.mark.parametrize("is_parameter", [False, True])
    @pytest.mark.with_float64("scaled formats compute in float64")
    def test_a_plain_tensor_does_not_take_the_data_of_an_expansion(self, is_parameter):
        plain = torch.zeros(4, dtype=torch.bfloat16)
        scaled = mcf.as_expansion(torch.ones(4), mcf.scaling.scaled(torch.float16))
        for x in (parameter(mcf.bf16x2, 4), scaled):
            with pytest.raises(TypeError, match=r"data: a plain tensor .*copy_\(\)"):
                (nn.Parameter(plain) if is_parameter else plain).data = x
            assert plain.tolist() == [0] * 4
            with pytest.raises((TypeError, RuntimeError), match=r"__dlpack__|storage"):
                torch.to_dlpack(x)

    def test_data_of_plain_tensors_is_pytorchs(self):
        plain = torch.zeros(4, requires_grad=True)
        assert not plain.data.requires_grad
        plain.data = torch.ones(2, 3)
        assert plain.shape == (2, 3)
        with pytest.raises(RuntimeError):
            plain.data = torch.ones(2, device="meta").to_sparse()
        with pytest.raises(TypeError):
            plain.data = 1
        double = torch.compile(lambda x: x.data * 2, fullgraph=True, backend="eager")
        assert double(plain).sum() == 12

    def test_a_plain_tensor_takes_the_values_by_copy(self):
        x, plain = sample(mcf.bf16x2, 4), torch.zeros(4)
        plain.data.copy_(x)
        assert torch.equal(plain, mcf.as_plain(x, torch.float32))
        plain.data = mcf.as_plain(x, torch.float32)
        assert torch.equal(plain, mcf.as_plain(x, torch.float32))

    def test_vectors(self):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        vector = nn.utils.parameters_to_vector(model.parameters())
        assert vector.format == mcf.bf16x3
        with pytest.raises(TypeError, match="data:"):
            nn.utils.vector_to_parameters(mcf.as_plain(vector), model.parameters())
        nn.utils.vector_to_parameters(vector.detach(), model.parameters())
        for p, q in zip(model.parameters(), before.parameters(), strict=True):
            assert p.format == vector.format  # whose memory they are in
            assert p.tolist() == q.tolist()

    def test_swapped_tensors(self):
        x, y = sample(mcf.bf16x2, 4), sample(mcf.bf16x3, 2, 3)
        expected = y.clone()
        torch.utils.swap_tensors(x, y)
        assert_same_terms(x, expected)
        assert x.shape == (2, 3)
        plain = torch.ones(3)
        torch.utils.swap_tensors(x, plain)
        assert type(x) is torch.Tensor
        assert_same_terms(plain, expected)

    def test_functional_calls(self):
        model = mcf.as_expansion(small_model())
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
        expected = copy.deepcopy(model)
        expected.load_state_dict(doubled)
        assert torch.equal(torch.func.functional_call(model, doubled, x), expected(x))


@pytest.fixture(params=["data", "swap", "overwrite"])
def conversion(request):
    """The three ways in which `Module._apply` puts a converted parameter into its place."""
    torch.__future__.set_swap_module_params_on_conversion(request.param == "swap")
    torch.__future__.set_overwrite_module_params_on_conversion(request.param == "overwrite")
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.__future__.set_overwrite_module_params_on_conversion(False)


class TestModules:
    @pytest.mark.parametrize("name", ["half", "float", "double"])
    def test_another_dtype(self, conversion, name):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        if conversion == "data":
            with pytest.raises(TypeError, match=r"mcf\.as_plain\(module\)"):
                getattr(model, name)()
            assert_same_model(model, before)
        else:  # asked for by name, torch's other two ways make plain parameters of them
            getattr(model, name)()
            for p, q in zip(model.parameters(), before.parameters(), strict=True):
                assert type(p) is nn.Parameter
                assert torch.equal(p, mcf.as_plain(q, p.dtype))

    def test_the_same_dtype_changes_nothing(self, conversion):
        model = mcf.as_expansion(small_model())
        before = copy.deepcopy(model)
        for converted in (model.bfloat16(), model.to(torch.bfloat16), model.to("cpu")):
            assert_same_model(converted, before)

    def test_another_device(self, conversion):
        model = mcf.as_expansion(small_model()).to("meta")
        for p in model.parameters():
            assert (p.device.type, p.components[1].device.type) == ("meta", "meta")
            assert isinstance(p, nn.Parameter)
        model.to_empty(device="cpu")
        assert all(p.format.base == torch.bfloat16 for p in model.parameters())
        model.load_state_dict(mcf.as_expansion(small_model(seed=1)).state_dict())
        assert_same_model(model, mcf.as_expansion(small_model(seed=1)))

    @pytest.mark.parametrize("device", ["meta", requires_cuda])
    def test_another_device_with_weak_references(self, device):
        model = mcf.as_expansion(small_model())
        before = model[0].weight.detach().clone()
        reference = weakref.ref(model[0].weight)
        with pytest.raises(RuntimeError, match=r"Couldn't swap Linear\.weight"):
            model.to(device)
        assert_same_terms(model[0].weight.detach(), before)
        assert reference() is model[0].weight

    @pytest.mark.parametrize("device", [requires_cuda])
    def test_there_and_back(self, conversion, device):
        model = mcf.as_expansion(nn.Sequential(small_model(), nn.LSTM(2, 3)))
        before = copy.deepcopy(model)
        assert all(p.is_cuda for p in model.to(device).parameters())
        assert_same_model(model.cpu(), before)

    @pytest.mark.parametrize("assign", [False, True])
    def test_checkpoints(self, conversion, assign):
        source, model = mcf.as_expansion(small_model(seed=1)), mcf.as_expansion(small_model())
        for state in (source.state_dict(), saved(source.state_dict())):
            model = mcf.as_expansion(small_model())
            model.load_state_dict(state, assign=assign)
            assert_same_model(model, source)
        model.load_state_dict(small_model(seed=2).state_dict(), assign=assign)
        assert_same_model(model, mcf.as_expansion(small_model(seed=2)))

    def test_a_plain_model_takes_expansions_when_they_are_assigned(self, conversion):
        source, model = mcf.as_expansion(small_model(seed=1)), small_model()
        model.load_state_dict(source.state_dict())
        assert all(type(p) is nn.Parameter for p in model.parameters())
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            assert torch.equal(p, mcf.as_plain(q, torch.float32))
        model.load_state_dict(source.state_dict(), assign=True)
        assert_same_model(model, source)

    def test_whole_models_are_pickled(self):
        model = mcf.as_expansion(small_model())
        assert_same_model(pickle.loads(pickle.dumps(model)), model)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return sample(mcf.bf16x3, 5, seed=index)


def answer(given, questions, answers):
    """Send back what arrived, update what is shared, and wait until it has been taken."""
    with torch.no_grad():
        given.add_(1)
    answers.put([x * 1 for x in questions.get()])
    questions.get()


class TestProcesses:
    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    @pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
    def test_queues_and_arguments(self, method):
        context = torch.multiprocessing.get_context(method)
        questions, answers = context.Queue(), context.Queue()
        shared = parameter(mcf.bf16x3, 4)
        shared.share_memory_()
        expected = shared.detach() + 1
        process = context.Process(target=answer, args=(shared, questions, answers))
        process.start()
        sent = [sample(mcf.bf16x2, 3, 4)[1:], sample(mcf.fp32x3, 2), parameter(mcf.bf16x2, 2)]
        questions.put(sent)
        received = answers.get(timeout=120)
        received = [x.clone() for x in received]
        questions.put(None)
        process.join(120)
        assert process.exitcode == 0
        for x, y in zip(sent, received, strict=True):
            assert x.role == y.role
            assert_same_terms(x.detach(), y.detach())
        assert_same_terms(shared.detach(), expected)

    @pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
    def test_data_loaders(self):
        loader = torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=1)
        for i, batch in enumerate(loader):
            expected = torch.stack([sample(mcf.bf16x3, 5, seed=2 * i + j) for j in range(2)])
            assert_same_terms(batch, expected)
