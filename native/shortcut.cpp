#include "shortcut.hpp"

#include "dlpack.hpp"
#include "extent.hpp"

#include <pthread.h>

#include <atomic>
#include <new>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace phalanx {

Known known;

namespace {

constexpr Py_ssize_t kManyInFlight = 256;  // of `_health`: then the long way looks who has ended

// -- what a tensor is ------------------------------------------------------------------------------

struct Exchange {
  std::uint32_t major, minor;
  const Exchange* older;
  void *allocate, *give, *take;
  int (*inspect)(void* tensor, void* told);
  void* stream;
};

// Fills in what the engine needs of a tensor, and its record; tells whether it is an ordinary one.
bool describe(PyObject* tensor, ReduceOp op, Request& request, PyObject* call) {
  Told told;
  if (known.inspect(tensor, &told) != 0) return false;
  const int type = type_of(told);
  const std::uint64_t count = elements_in_a_row(told);
  if (told.device_type != kCpu || type < 0 || count == 0 || told.data == nullptr) return false;
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  if (nb::steal(PyObject_CallMethodNoArgs(tensor, is_neg)).ptr() != Py_False) return false;

  request.kind = Kind::allreduce;
  request.reduction = {static_cast<DType>(type), op, 1.0};
  request.input = static_cast<char*>(told.data) + told.byte_offset;
  request.bytes = request.output_bytes = count * size_of(request.reduction.type);
  request.outputs.push_back(request.input);

  const nb::object shape = nb::steal(PyTuple_New(told.dims));
  if (!shape.is_valid()) return false;
  for (std::int32_t dim = 0; dim < told.dims; ++dim)
    PyTuple_SET_ITEM(shape.ptr(), dim, PyLong_FromLongLong(told.shape[dim]));
  request.extent = extent_of(request.bytes, shape);
  known.call.shape.set(call, shape.ptr());
  known.call.dtype.set(call, PyTuple_GET_ITEM(known.dtypes, type));
  known.call.tensors.set(call, nb::int_(1).ptr());
  return true;
}

// -- the record -----------------------------------------------------------------------------------

// Notes where the user's code is. The innermost frame is that of the group's method.
bool note_site(PyObject* call) {
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
  if (PyDict_GetItemWithError(known.files, file) != Py_False) {
    frame = nb::steal(PyObject_CallOneArg(known.user_frame, frame.ptr()));
    if (!frame.is_valid()) return false;
    code = code_of();
  }
  known.call.code.set(call, code.ptr());
  const int at = PyFrame_GetLasti(reinterpret_cast<PyFrameObject*>(frame.ptr()));
  known.call.instruction.set(call, nb::int_(at).ptr());
  return true;
}

nb::object new_call(PyObject* operation) {
  nb::object call = nb::steal(known.call_type->tp_alloc(known.call_type, 0));
  if (!call.is_valid()) throw nb::python_error();
  known.call.operation.set(call.ptr(), operation);
  known.call.transfer.set(call.ptr(), Py_False);
  known.call.ended.set(call.ptr(), Py_None);
  return call;
}

// Numbers the call and hands it to the engine. Nothing in here can let another thread run, so the
// numbers are in the order in which the engine sees calls; unless somebody is between the two on
// the long way, with the lock, and then this call takes that way too.
Engine::Issued number_and_issue(Shortcut* self, Request&& request, ShortWork* work) {
  if (self->engine == nullptr) return {};  // closed meanwhile: until here, others could run
  if (nb::steal(PyObject_CallNoArgs(self->is_ordered)).ptr() != Py_False) return {};
  // A start and its clean-up were both interrupted: `cut_short` on the long way repairs the numbers.
  if (known.starting.get(self->recorder).ptr() != Py_None) return {};
  const nb::object last = known.collectives.get(self->recorder);
  const nb::object sequence =
      nb::steal(PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(last.ptr()) + 1));
  known.call.sequence.set(work->call, sequence.ptr());
  known.call.started.set(work->call, nb::float_(seconds_now()).ptr());
  const Engine::Issued issued = self->engine->try_issue(std::move(request));
  if (issued.ticket != 0) known.collectives.set(self->recorder, sequence.ptr());
  work->ticket = issued.ticket;
  return issued;
}

// -- the calls ------------------------------------------------------------------------------------

PyObject* make_call(Shortcut* self, PyObject* operation, PyObject* tensor, ReduceOp op) {
  const bool usual = self->engine != nullptr && self->made_after == forks() &&
                     PyDict_GET_SIZE(self->in_flight) <= kManyInFlight && !has_fault_points();
  if (!usual || (tensor != nullptr && !is_a_plain_tensor(tensor))) return nullptr;
  const nb::object call = new_call(operation);
  Request request;
  if (tensor != nullptr) {
    if (!describe(tensor, op, request, call.ptr())) return nullptr;
  } else {
    const nb::tuple none;
    request.kind = Kind::barrier;
    request.reduction = {DType::uint8, op, 1.0};
    request.extent = extent_of(0, none);
    known.call.dtype.set(call.ptr(), Py_None);
    known.call.shape.set(call.ptr(), none.ptr());
    known.call.tensors.set(call.ptr(), nb::int_(0).ptr());
  }
  if (!note_site(call.ptr())) return nullptr;
  ShortWork* const work = new_work(self, call.ptr(), tensor);
  nb::object result = nb::steal(reinterpret_cast<PyObject*>(work));
  // The tensor is kept before the engine works on it, until it has ended.
  if (PyDict_SetItem(self->in_flight, call.ptr(), result.ptr()) != 0) throw nb::python_error();
  Engine::Issued issued;
  try {
    issued = number_and_issue(self, std::move(request), work);
  } catch (...) {  // with nothing issued
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
    work->engine->test(issued.ticket);  // does this rank's shares of what the others are ready for
  }
  return result.release().ptr();
}

// Turns "not an ordinary call" into None, whatever it was about; the long way finds out, and says so.
PyObject* attempt(PyObject* self, PyObject* operation, PyObject* tensor,
                  ReduceOp op = ReduceOp::sum) {
  PyObject* work = nullptr;
  try {
    work = make_call(reinterpret_cast<Shortcut*>(self), operation, tensor, op);
  } catch (nb::python_error& error) {
    error.restore();
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  if (work != nullptr) return work;
  // What looks for the user's frame is written in Python, and a signal may interrupt it.
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
  static const char* keywords[] = {"engine", "owner",     "order", "recorder", "calls",
                                   "in_flight", "grow", "timeout", nullptr};
  PyObject *native, *owner, *order, *recorder, *calls, *in_flight, *grow, *timeout;
  if (!PyArg_ParseTupleAndKeywords(args, names, "$OOOOOO!OO", const_cast<char**>(keywords), &native,
                                   &owner, &order, &recorder, &calls, &PyDict_Type, &in_flight,
                                   &grow, &timeout))
    return nullptr;
  const nb::object is_ordered = nb::steal(PyObject_GetAttrString(order, "locked"));
  const nb::object append = nb::steal(PyObject_GetAttrString(calls, "append"));
  Engine* engine = nullptr;
  if (!is_ordered.is_valid() || !append.is_valid()) return nullptr;
  if (!nb::try_cast(nb::handle(native), engine)) {
    PyErr_SetString(PyExc_TypeError, "not an engine");
    return nullptr;
  }
  auto* const self = reinterpret_cast<Shortcut*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->engine = engine;
  self->made_after = forks();
  self->native = Py_NewRef(native);
  self->owner = Py_NewRef(owner);
  self->is_ordered = Py_NewRef(is_ordered.ptr());
  self->recorder = Py_NewRef(recorder);
  self->append = Py_NewRef(append.ptr());
  self->in_flight = Py_NewRef(in_flight);
  self->grow = Py_NewRef(grow);
  self->timeout = Py_NewRef(timeout);
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  const auto* const self = reinterpret_cast<Shortcut*>(object);
  for (PyObject* const part : {self->native, self->owner, self->is_ordered, self->recorder,
                               self->append, self->in_flight, self->grow, self->timeout})
    Py_VISIT(part);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

// What calls under way need of a closed group stays; its engine, which is its memory, does not.
void let_go_of_engine(Shortcut* self) {
  self->engine = nullptr;
  Py_CLEAR(self->native);
  Py_CLEAR(self->owner);
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<Shortcut*>(object);
  let_go_of_engine(self);
  for (PyObject** part : {&self->is_ordered, &self->recorder, &self->append, &self->in_flight,
                          &self->grow, &self->timeout})
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
  let_go_of_engine(reinterpret_cast<Shortcut*>(self));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"sum", sum, METH_O, "Add up a tensor over all ranks; None if it takes the long way."},
    {"mean", mean, METH_O, "Average a tensor over all ranks; None if it takes the long way."},
    {"barrier", barrier, METH_NOARGS, "Meet all ranks; None if it takes the long way."},
    {"close", close, METH_NOARGS, "Send every call the long way from now on."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"timeout", T_OBJECT_EX, offsetof(Shortcut, timeout), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The short way of one group's plain sums and barriers.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec{"phalanx.native._engine.Shortcut", sizeof(Shortcut), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

// Takes note of what all groups share; returns whether torch has what a shortcut needs.
bool prepare(nb::type_object call, nb::type_object recorder, nb::dict files, nb::object user_frame,
             nb::dict fault_points, nb::object work, nb::tuple tensors, nb::object strided,
             nb::tuple dtypes, nb::capsule exchange) {
  const auto* table = static_cast<const Exchange*>(exchange.data("dlpack_exchange_api"));
  while (table != nullptr && table->major > 1) table = table->older;
  if (table == nullptr || table->major != 1 || table->inspect == nullptr) return false;
  auto* const type = reinterpret_cast<PyTypeObject*>(call.ptr());
  auto& of = known.call;
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
  known.collectives = Slot(reinterpret_cast<PyTypeObject*>(recorder.ptr()), "collectives");
  known.starting = Slot(reinterpret_cast<PyTypeObject*>(recorder.ptr()), "starting");
  known.inspect = table->inspect;
  known.call_type = type;
  call.inc_ref();
  known.files = files.release().ptr();
  known.user_frame = user_frame.release().ptr();
  known.fault_points = fault_points.release().ptr();
  known.work_type = work.release().ptr();
  known.tensor_types = tensors.release().ptr();
  known.strided = strided.release().ptr();
  known.dtypes = dtypes.release().ptr();
  ::pthread_atfork(nullptr, nullptr, [] { forked.fetch_add(1, std::memory_order_relaxed); });
  return true;
}

}  // namespace

bool is_a_plain_tensor(PyObject* object) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  bool plain = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(known.tensor_types); ++i)
    plain = plain || PyTuple_GET_ITEM(known.tensor_types, i) == type;
  static PyObject* const layout = PyUnicode_InternFromString("layout");
  // Asked first, for of a sparse tensor DLPack would have a story to tell, which takes long.
  return plain && nb::steal(PyObject_GetAttr(object, layout)).ptr() == known.strided;
}

Slot::Slot(PyTypeObject* type, const char* name) {
  const nb::object slot = nb::getattr(reinterpret_cast<PyObject*>(type), name);
  if (Py_TYPE(slot.ptr()) != &PyMemberDescr_Type) throw nb::type_error(name);
  member_ = reinterpret_cast<PyMemberDescrObject*>(slot.ptr())->d_member;
}

bool has_fault_points() {
  static PyObject* const armed = PyUnicode_InternFromString("armed");
  PyObject* const handlers = PyDict_GetItemWithError(known.fault_points, armed);
  return handlers == nullptr || PyTuple_GET_SIZE(handlers) != 0;
}

double seconds_now() { return static_cast<double>(now_ns()) / 1e9; }

int forks() { return forked.load(std::memory_order_relaxed); }

void add_shortcut(nb::module_& module) {
  module.attr("Shortcut") = nb::steal(PyType_FromSpec(&spec));
  module.def("prepare_shortcuts", &prepare, nb::kw_only(), "call"_a, "recorder"_a, "files"_a,
             "user_frame"_a, "fault_points"_a, "work"_a, "tensors"_a, "strided"_a, "dtypes"_a,
             "exchange"_a);
}

}  // namespace phalanx
