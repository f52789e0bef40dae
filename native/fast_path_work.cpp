#include "fast_path.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// Nanoseconds before a wait takes the slow path: much longer than a peer in the same call needs, and
// shorter than the first check for overdue calls.
constexpr std::uint64_t kFastWait = 1'000'000;

PyTypeObject* type = nullptr;

FastPathWork* cast(PyObject* object) { return reinterpret_cast<FastPathWork*>(object); }

// Creates the group's `Work` once; returns a borrowed reference, or null with an exception.
PyObject* full_work(FastPathWork* self) {
  if (self->full_work != nullptr) return self->full_work;
  const nb::object ticket = nb::steal(PyLong_FromUnsignedLongLong(self->ticket));
  PyObject* const tensor = self->tensor == nullptr ? Py_None : self->tensor;
  nb::object work = nb::steal(PyObject_CallFunctionObjArgs(
      self->fast_path->make_work, self->owner, self->call, self->timeout, ticket.ptr(), tensor,
      self->settled ? Py_True : Py_False, nullptr));
  if (!work.is_valid()) return nullptr;
  if (self->full_work != nullptr) return self->full_work;  // created by another thread meanwhile
  PyObject* const in_flight = self->fast_path->in_flight;
  const int is_in_flight = PyDict_Contains(in_flight, self->call);
  if (is_in_flight < 0) return nullptr;
  if (is_in_flight == 1 && PyDict_SetItem(in_flight, self->call, work.ptr()) != 0) return nullptr;
  return self->full_work = work.release().ptr();
}

PyObject* call_full_work(PyObject* self, const char* method) {
  PyObject* const work = full_work(cast(self));
  return work == nullptr ? nullptr : PyObject_CallMethod(work, method, nullptr);
}

// Whether no `Work` has taken over.
bool is_fast(const FastPathWork* self) {
  return self->full_work == nullptr && self->fast_path->forks_at_creation == forks() &&
         !has_fault_points();
}

void settle(FastPathWork* self) {
  if (self->settled) return;
  self->settled = true;
  runtime.call.ended.set(self->call, nb::float_(monotonic_seconds()).ptr());
  // The dictionary may have been cleared.
  if (PyDict_DelItem(self->fast_path->in_flight, self->call) != 0) PyErr_Clear();
}

PyObject* wait(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  FastPathWork* const self = cast(object);
  if (count != 0 || names != nullptr || !is_fast(self)) {
    PyObject* const work = full_work(self);
    if (work == nullptr) return nullptr;
    const nb::object method = nb::steal(PyObject_GetAttrString(work, "wait"));
    if (!method.is_valid()) return nullptr;
    return PyObject_Vectorcall(method.ptr(), args, static_cast<std::size_t>(count), names);
  }
  if (!self->engine->has_succeeded(self->ticket)) {
    Outcome outcome;
    {
      const nb::gil_scoped_release release;
      outcome = self->engine->wait(self->ticket, kFastWait).outcome;
    }
    if (outcome != Outcome::finished || self->full_work != nullptr)
      return call_full_work(object, "wait");
  }
  settle(self);
  Py_RETURN_TRUE;
}

PyObject* is_completed(PyObject* object, PyObject*) {
  FastPathWork* const self = cast(object);
  if (!is_fast(self) || !self->engine->has_succeeded(self->ticket))
    return call_full_work(object, "is_completed");
  settle(self);
  Py_RETURN_TRUE;
}

PyObject* engine_is_done(PyObject* object, PyObject*) {
  FastPathWork* const self = cast(object);
  if (!is_fast(self)) return call_full_work(object, "engine_is_done");
  Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome = self->engine->test(self->ticket).outcome;
  }
  return PyBool_FromLong(outcome != Outcome::pending);
}

PyObject* as_work(PyObject* object, PyObject*) { return Py_XNewRef(full_work(cast(object))); }

// Makes `isinstance(work, torch.distributed.Work)` true.
PyObject* shown_class(PyObject*, void*) { return Py_NewRef(runtime.work_type); }

int traverse(PyObject* object, visitproc visit, void* arg) {
  const FastPathWork* const self = cast(object);
  for (PyObject* const part : {reinterpret_cast<PyObject*>(self->fast_path), self->owner, self->call,
                               self->tensor, self->timeout, self->full_work})
    Py_VISIT(part);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear(PyObject* object) {
  FastPathWork* const self = cast(object);
  for (PyObject** const part : {reinterpret_cast<PyObject**>(&self->fast_path), &self->owner,
                                &self->call, &self->tensor, &self->timeout, &self->full_work})
    Py_CLEAR(*part);
  return 0;
}

void destroy(PyObject* object) {
  PyObject_GC_UnTrack(object);
  if (cast(object)->weak_references != nullptr) PyObject_ClearWeakRefs(object);
  clear(object);
  PyObject_GC_Del(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait)),
     METH_FASTCALL | METH_KEYWORDS, "Wait until the call has ended or its deadline has passed."},
    {"is_completed", is_completed, METH_NOARGS, "Return whether the call has ended."},
    {"engine_is_done", engine_is_done, METH_NOARGS, "Return whether the operation has ended."},
    {"as_work", as_work, METH_NOARGS, "Return the `Work` of this call."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"__class__", shown_class, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(FastPathWork, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("A call on the fast path.")},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec{"phalanx.native._engine.FastPathWork", sizeof(FastPathWork), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

FastPathWork* new_work(FastPath* fast_path, PyObject* call, PyObject* tensor) {
  FastPathWork* const self = PyObject_GC_New(FastPathWork, type);
  if (self == nullptr) throw nb::python_error();
  self->weak_references = nullptr;
  self->fast_path = reinterpret_cast<FastPath*>(Py_NewRef(reinterpret_cast<PyObject*>(fast_path)));
  self->engine = fast_path->engine;
  self->owner = Py_XNewRef(fast_path->owner);  // null if the group has been closed
  self->call = Py_NewRef(call);
  self->tensor = Py_XNewRef(tensor);
  self->timeout = Py_NewRef(fast_path->timeout);
  self->full_work = nullptr;
  self->ticket = 0;
  self->settled = false;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return self;
}

void register_fast_path_work(nb::module_& module) {
  const nb::object made = nb::steal(PyType_FromSpec(&spec));
  module.attr("FastPathWork") = made;
  type = reinterpret_cast<PyTypeObject*>(made.inc_ref().ptr());  // never freed
}

}  // namespace phalanx
