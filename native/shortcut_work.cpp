#include "shortcut.hpp"

namespace nb = nanobind;

namespace phalanx {

namespace {

// How long a wait may take before it is the long way's: much longer than a peer that is at it too,
// and short enough for nobody to have asked yet what this rank is doing.
constexpr std::uint64_t kMoment = 1'000'000;  // nanoseconds

PyTypeObject* type = nullptr;

ShortWork* cast(PyObject* object) { return reinterpret_cast<ShortWork*>(object); }

// Makes the group's own `Work` of it, once; a borrowed reference, or null and an exception.
PyObject* grown(ShortWork* self) {
  if (self->grown != nullptr) return self->grown;
  const nb::object ticket = nb::steal(PyLong_FromUnsignedLongLong(self->ticket));
  PyObject* const tensor = self->tensor == nullptr ? Py_None : self->tensor;
  nb::object work = nb::steal(PyObject_CallFunctionObjArgs(
      self->shortcut->grow, self->owner, self->call, self->timeout, ticket.ptr(), tensor,
      self->settled ? Py_True : Py_False, nullptr));
  if (!work.is_valid()) return nullptr;
  if (self->grown != nullptr) return self->grown;  // another thread was here meanwhile
  PyObject* const in_flight = self->shortcut->in_flight;
  const int known_there = PyDict_Contains(in_flight, self->call);
  if (known_there < 0) return nullptr;
  if (known_there == 1 && PyDict_SetItem(in_flight, self->call, work.ptr()) != 0) return nullptr;
  return self->grown = work.release().ptr();
}

PyObject* ask_grown(PyObject* self, const char* method) {
  PyObject* const work = grown(cast(self));
  return work == nullptr ? nullptr : PyObject_CallMethod(work, method, nullptr);
}

// Whether it is still for this object to say how the call stands.
bool is_simple(const ShortWork* self) {
  return self->grown == nullptr && self->shortcut->made_after == forks() && !has_fault_points();
}

void settle(ShortWork* self) {
  if (self->settled) return;
  self->settled = true;
  known.call.ended.set(self->call, nb::float_(seconds_now()).ptr());
  if (PyDict_DelItem(self->shortcut->in_flight, self->call) != 0) PyErr_Clear();  // it was cleared
}

PyObject* wait(PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  ShortWork* const self = cast(object);
  if (count != 0 || names != nullptr || !is_simple(self)) {
    PyObject* const work = grown(self);
    if (work == nullptr) return nullptr;
    const nb::object method = nb::steal(PyObject_GetAttrString(work, "wait"));
    if (!method.is_valid()) return nullptr;
    return PyObject_Vectorcall(method.ptr(), args, static_cast<std::size_t>(count), names);
  }
  if (!self->engine->ended_well(self->ticket)) {
    Outcome outcome;
    {
      const nb::gil_scoped_release release;
      outcome = self->engine->wait(self->ticket, kMoment).outcome;
    }
    if (outcome != Outcome::finished || self->grown != nullptr) return ask_grown(object, "wait");
  }
  settle(self);
  Py_RETURN_TRUE;
}

PyObject* is_completed(PyObject* object, PyObject*) {
  ShortWork* const self = cast(object);
  if (!is_simple(self) || !self->engine->ended_well(self->ticket))
    return ask_grown(object, "is_completed");
  settle(self);
  Py_RETURN_TRUE;
}

PyObject* engine_is_done(PyObject* object, PyObject*) {
  ShortWork* const self = cast(object);
  if (!is_simple(self)) return ask_grown(object, "engine_is_done");
  Outcome outcome;
  {
    const nb::gil_scoped_release release;
    outcome = self->engine->test(self->ticket).outcome;
  }
  return PyBool_FromLong(outcome != Outcome::pending);
}

PyObject* as_work(PyObject* object, PyObject*) { return Py_XNewRef(grown(cast(object))); }

// So that `isinstance(work, torch.distributed.Work)` holds, as it does for the others.
PyObject* shown_class(PyObject*, void*) { return Py_NewRef(known.work_type); }

int traverse(PyObject* object, visitproc visit, void* arg) {
  const ShortWork* const self = cast(object);
  for (PyObject* const part : {reinterpret_cast<PyObject*>(self->shortcut), self->owner, self->call,
                               self->tensor, self->timeout, self->grown})
    Py_VISIT(part);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear(PyObject* object) {
  ShortWork* const self = cast(object);
  for (PyObject** const part : {reinterpret_cast<PyObject**>(&self->shortcut), &self->owner,
                                &self->call, &self->tensor, &self->timeout, &self->grown})
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
     METH_FASTCALL | METH_KEYWORDS, "Block until the call is done or its deadline has passed."},
    {"is_completed", is_completed, METH_NOARGS, "Tell whether the call has ended, well or badly."},
    {"engine_is_done", engine_is_done, METH_NOARGS, "Tell whether the engine has let go of it."},
    {"as_work", as_work, METH_NOARGS, "Return the group's own work of this call."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef properties[] = {
    {"__class__", shown_class, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ShortWork, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("One plain sum or barrier of a group, under way or done.")},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec{"phalanx.native._engine.ShortWork", sizeof(ShortWork), 0,
                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

}  // namespace

ShortWork* new_work(Shortcut* shortcut, PyObject* call, PyObject* tensor) {
  ShortWork* const self = PyObject_GC_New(ShortWork, type);
  if (self == nullptr) throw nb::python_error();
  self->weak_references = nullptr;
  self->shortcut = reinterpret_cast<Shortcut*>(Py_NewRef(reinterpret_cast<PyObject*>(shortcut)));
  self->engine = shortcut->engine;
  self->owner = Py_XNewRef(shortcut->owner);  // null if the group was closed meanwhile
  self->call = Py_NewRef(call);
  self->tensor = Py_XNewRef(tensor);
  self->timeout = Py_NewRef(shortcut->timeout);
  self->grown = nullptr;
  self->ticket = 0;
  self->settled = false;
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return self;
}

void add_work(nb::module_& module) {
  const nb::object made = nb::steal(PyType_FromSpec(&spec));
  module.attr("ShortWork") = made;
  type = reinterpret_cast<PyTypeObject*>(made.inc_ref().ptr());  // for as long as the process lives
}

}  // namespace phalanx
