#include "fast_path.hpp"

#include <pthread.h>

#include <atomic>
#include <new>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

Runtime runtime;

namespace {

struct DlExchangeApi {
  std::uint32_t major, minor;
  const DlExchangeApi* older;
  void *allocate, *to_python, *from_python;
  int (*inspect)(void* tensor, void* result);
  void* stream;
};

// Fills in the request and the record of a tensor. Returns false for tensors of the slow path.
bool describe(PyObject* tensor, ReduceOp op, Request& request, PyObject* call) {
  DlTensor view;
  if (!read_tensor(tensor, view)) return false;
  const int type = dtype_of(view);
  const std::uint64_t count = contiguous_elements(view);
  if (type < 0 || count == 0 || view.data == nullptr) return false;

  request.kind = Collective::allreduce;
  request.reduction = {static_cast<DType>(type), op, 1.0};
  request.input = static_cast<char*>(view.data) + view.byte_offset;
  request.bytes = request.output_bytes = count * size_of(request.reduction.type);
  request.outputs.push_back(request.input);

  const nb::object shape = nb::steal(PyTuple_New(view.dims));
  if (!shape.is_valid()) return false;
  for (std::int32_t dim = 0; dim < view.dims; ++dim)
    PyTuple_SET_ITEM(shape.ptr(), dim, PyLong_FromLongLong(view.shape[dim]));
  request.fingerprint = fingerprint_of(request.bytes, shape);
  runtime.call.shape.set(call, shape.ptr());
  runtime.call.dtype.set(call, PyTuple_GET_ITEM(runtime.dtypes, type));
  runtime.call.tensors.set(call, nb::int_(1).ptr());
  return true;
}

// Records the user's line. The innermost frame is that of the group's method.
bool record_call_site(PyObject* call) {
  PyFrameObject* const innermost = PyEval_GetFrame();
  if (innermost == nullptr) return false;
  nb::object frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(innermost)));
  if (!frame.is_valid()) return false;
  const auto code_of = [&] {
    return nb::steal(reinterpret_cast<PyObject*>(
        PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
  };
  nb::object code = code_of();
  PyObject* const file = reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename;
  if (PyDict_GetItemWithError(runtime.files, file) != Py_False) {
    frame = nb::steal(PyObject_CallOneArg(runtime.user_frame, frame.ptr()));
    if (!frame.is_valid()) return false;
    code = code_of();
  }
  runtime.call.code.set(call, code.ptr());
  const int at = PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  runtime.call.instruction.set(call, nb::int_(at).ptr());
  return true;
}

nb::object new_call(PyObject* operation) {
  nb::object call = nb::steal(runtime.call_type->tp_alloc(runtime.call_type, 0));
  if (!call.is_valid()) throw nb::python_error();
  runtime.call.operation.set(call.ptr(), operation);
  runtime.call.transfer.set(call.ptr(), Py_False);
  runtime.call.ended.set(call.ptr(), Py_None);
  return call;
}

// Nothing in here releases the GIL, so sequence numbers are in the order in which the engine sees calls.
// If a thread on the slow path holds the issue lock between the two, this call takes the slow path too.
Engine::Issued assign_sequence_and_issue(FastPath* self, Request&& request, FastPathWork* work) {
  if (self->engine == nullptr) return {};  // closed while other threads could run
  if (nb::steal(PyObject_CallNoArgs(self->is_locked)).ptr() != Py_False) return {};
  // A start and its clean-up were both interrupted: the slow path repairs the sequence number.
  if (runtime.starting.get(self->recorder).ptr() != Py_None) return {};
  const nb::object last = runtime.collectives.get(self->recorder);
  const nb::object sequence =
      nb::steal(PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(last.ptr()) + 1));
  runtime.call.sequence.set(work->call, sequence.ptr());
  runtime.call.started.set(work->call, nb::float_(monotonic_seconds()).ptr());
  const Engine::Issued issued = self->engine->try_issue(std::move(request));
  if (issued.ticket != 0) runtime.collectives.set(self->recorder, sequence.ptr());
  work->ticket = issued.ticket;
  return issued;
}

PyObject* make_call(FastPath* self, PyObject* operation, PyObject* tensor, ReduceOp op) {
  const bool eligible = self->engine != nullptr && self->forks_at_creation == forks() &&
                        PyDict_GET_SIZE(self->in_flight) <= runtime.max_in_flight &&
                        !has_fault_points() && !has_profiler();
  if (!eligible || (tensor != nullptr && !is_plain_tensor(tensor))) return nullptr;
  const nb::object call = new_call(operation);
  Request request;
  if (tensor != nullptr) {
    if (!describe(tensor, op, request, call.ptr())) return nullptr;
  } else {
    const nb::tuple none;
    request.kind = Collective::barrier;
    request.reduction = {DType::uint8, op, 1.0};
    request.fingerprint = fingerprint_of(0, none);
    runtime.call.dtype.set(call.ptr(), Py_None);
    runtime.call.shape.set(call.ptr(), none.ptr());
    runtime.call.tensors.set(call.ptr(), nb::int_(0).ptr());
  }
  if (!record_call_site(call.ptr())) return nullptr;
  FastPathWork* const work = new_work(self, call.ptr(), tensor);
  nb::object result = nb::steal(reinterpret_cast<PyObject*>(work));
  // Keeps the tensor alive from before the engine uses it until the call has ended.
  if (PyDict_SetItem(self->in_flight, call.ptr(), result.ptr()) != 0) throw nb::python_error();
  Engine::Issued issued;
  try {
    issued = assign_sequence_and_issue(self, std::move(request), work);
  } catch (...) {  // nothing was issued
    PyDict_DelItem(self->in_flight, call.ptr());
    throw;
  }
  if (issued.ticket == 0) {
    PyDict_DelItem(self->in_flight, call.ptr());
    return nullptr;
  }
  if (!nb::steal(PyObject_CallOneArg(self->append, call.ptr())).is_valid()) throw nb::python_error();
  if (issued.more) {
    const nb::gil_scoped_release release;
    work->engine->test(issued.ticket);
  }
  return result.release().ptr();
}

// Returns None if the call has to take the slow path, which also reports what is wrong with it.
PyObject* attempt(PyObject* self, PyObject* operation, PyObject* tensor,
                  ReduceOp op = ReduceOp::sum) {
  PyObject* work = nullptr;
  try {
    work = make_call(reinterpret_cast<FastPath*>(self), operation, tensor, op);
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (work != nullptr) return work;
  // The search for the user's frame runs Python code, which a signal may interrupt.
  if (PyErr_Occurred() != nullptr && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
  PyErr_Clear();
  Py_RETURN_NONE;
}

PyObject* allreduce(PyObject* self, PyObject* tensor, ReduceOp op) {
  static PyObject* const name = PyUnicode_InternFromString("allreduce");
  return attempt(self, name, tensor, op);
}

PyObject* sum(PyObject* self, PyObject* tensor) { return allreduce(self, tensor, ReduceOp::sum); }

PyObject* mean(PyObject* self, PyObject* tensor) { return allreduce(self, tensor, ReduceOp::avg); }

PyObject* barrier(PyObject* self, PyObject*) {
  static PyObject* const name = PyUnicode_InternFromString("barrier");
  return attempt(self, name, nullptr);
}

// -- the type -------------------------------------------------------------------------------------

std::atomic<int> forked{0};

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* names) {
  static const char* keywords[] = {"engine",    "owner",     "issue_lock", "recorder", "calls",
                                   "in_flight", "make_work", "timeout",    nullptr};
  PyObject *native, *owner, *issue_lock, *recorder, *calls, *in_flight, *make_work, *timeout;
  if (!PyArg_ParseTupleAndKeywords(args, names, "$OOOOOO!OO", const_cast<char**>(keywords), &native,
                                   &owner, &issue_lock, &recorder, &calls, &PyDict_Type, &in_flight,
                                   &make_work, &timeout))
    return nullptr;
  const nb::object is_locked = nb::steal(PyObject_GetAttrString(issue_lock, "locked"));
  const nb::object append = nb::steal(PyObject_GetAttrString(calls, "append"));
  Engine* engine = nullptr;
  if (!is_locked.is_valid() || !append.is_valid()) return nullptr;
  if (!nb::try_cast(nb::handle(native), engine)) {
    PyErr_SetString(PyExc_TypeError, "engine must be an Engine");
    return nullptr;
  }
  auto* const self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->engine = engine;
  self->forks_at_creation = forks();
  self->native = Py_NewRef(native);
  self->owner = Py_NewRef(owner);
  self->is_locked = Py_NewRef(is_locked.ptr());
  self->recorder = Py_NewRef(recorder);
  self->append = Py_NewRef(append.ptr());
  self->in_flight = Py_NewRef(in_flight);
  self->make_work = Py_NewRef(make_work);
  self->timeout = Py_NewRef(timeout);
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* const self = reinterpret_cast<FastPath*>(object);
  for (PyObject* const part : {self->native, self->owner, self->is_locked, self->recorder,
                               self->append, self->in_flight, self->make_work, self->timeout})
    Py_VISIT(part);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

// Keeps what calls in flight need of a closed group, but not the engine and its memory.
void release_engine(FastPath* self) {
  self->engine = nullptr;
  Py_CLEAR(self->native);
  Py_CLEAR(self->owner);
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<FastPath*>(object);
  release_engine(self);
  for (PyObject** part : {&self->is_locked, &self->recorder, &self->append, &self->in_flight,
                          &self->make_work, &self->timeout})
    Py_CLEAR(*part);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* close(PyObject* self, PyObject*) {
  release_engine(reinterpret_cast<FastPath*>(self));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"sum", sum, METH_O, "Sum a tensor over all ranks; return None for the slow path."},
    {"mean", mean, METH_O, "Average a tensor over all ranks; return None for the slow path."},
    {"barrier", barrier, METH_NOARGS, "Wait for all ranks; return None for the slow path."},
    {"close", close, METH_NOARGS, "Make every further call take the slow path."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"timeout", T_OBJECT_EX, offsetof(FastPath, timeout), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The fast path of one group.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec{"phalanx.native._engine.FastPath", sizeof(FastPath), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

// Sets what all groups share. Returns false if torch lacks a compatible DLPack exchange table.
bool configure(nb::type_object call, nb::type_object recorder, nb::dict files, nb::object user_frame,
             nb::dict fault_points, nb::dict profiler_flags, nb::str profiler_flag, nb::object work,
             nb::tuple tensors, nb::object strided, nb::tuple dtypes, nb::capsule exchange,
             Py_ssize_t max_in_flight) {
  const auto* table = static_cast<const DlExchangeApi*>(exchange.data("dlpack_exchange_api"));
  while (table != nullptr && table->major > 1) table = table->older;
  if (table == nullptr || table->major != 1 || table->inspect == nullptr) return false;
  auto* const type = reinterpret_cast<PyTypeObject*>(call.ptr());
  auto& of = runtime.call;
  for (const auto& [slot, name] : {std::pair{&of.sequence, "sequence"},
                                   {&of.operation, "operation"},
                                   {&of.dtype, "dtype"},
                                   {&of.shape, "shape"},
                                   {&of.tensors, "tensors"},
                                   {&of.started, "started"},
                                   {&of.ended, "ended"},
                                   {&of.code, "code"},
                                   {&of.instruction, "instruction"},
                                   {&of.transfer, "transfer"}})
    *slot = Slot(type, name);
  runtime.collectives = Slot(reinterpret_cast<PyTypeObject*>(recorder.ptr()), "collectives");
  runtime.starting = Slot(reinterpret_cast<PyTypeObject*>(recorder.ptr()), "starting");
  runtime.inspect = table->inspect;
  runtime.call_type = type;
  call.inc_ref();
  runtime.files = files.release().ptr();
  runtime.user_frame = user_frame.release().ptr();
  runtime.fault_points = {fault_points.release().ptr(), PyUnicode_InternFromString("armed")};
  runtime.is_profiling = {profiler_flags.release().ptr(), profiler_flag.release().ptr()};
  runtime.work_type = work.release().ptr();
  runtime.tensor_types = tensors.release().ptr();
  runtime.strided = strided.release().ptr();
  runtime.dtypes = dtypes.release().ptr();
  runtime.max_in_flight = max_in_flight;
  ::pthread_atfork(nullptr, nullptr, [] { forked.fetch_add(1, std::memory_order_relaxed); });
  return true;
}

}  // namespace

bool is_plain_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  bool plain = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(runtime.tensor_types); ++i)
    plain = plain || PyTuple_GET_ITEM(runtime.tensor_types, i) == type;
  static PyObject* const layout = PyUnicode_InternFromString("layout");
  // Checked before DLPack, which is slow to refuse a sparse tensor.
  return plain && nb::steal(PyObject_GetAttr(object, layout)).ptr() == runtime.strided;
}

bool read_tensor(PyObject* tensor, DlTensor& result) {
  if (runtime.inspect(tensor, &result) != 0 || result.device_type != kCpu) return false;
  // The negative bit of lazily negated tensors is not part of DLPack.
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  return nb::steal(PyObject_CallMethodNoArgs(tensor, is_neg)).ptr() == Py_False;
}

Slot::Slot(PyTypeObject* type, const char* name) {
  const nb::object slot = nb::getattr(reinterpret_cast<PyObject*>(type), name);
  if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw nb::type_error(name);
  member_ = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
}

bool has_fault_points() {
  PyObject* const handlers = runtime.fault_points.get();
  return handlers == nullptr || PyTuple_GET_SIZE(handlers) != 0;
}

bool has_profiler() { return runtime.is_profiling.get() != Py_False; }

double monotonic_seconds() { return static_cast<double>(now_ns()) / 1e9; }

int forks() { return forked.load(std::memory_order_relaxed); }

void register_fast_path(nb::module_& module) {
  module.attr("FastPath") = nb::steal(PyType_FromSpec(&spec));
  module.def("configure_fast_path", &configure, nb::kw_only(), "call"_a, "recorder"_a, "files"_a,
             "user_frame"_a, "fault_points"_a, "profiler_flags"_a, "profiler_flag"_a, "work"_a,
             "tensors"_a, "strided"_a, "dtypes"_a, "exchange"_a, "max_in_flight"_a);
}

}  // namespace phalanx
