// The fast path of the most frequent calls: allreduce (sum or mean) of one plain tensor, and barrier.
//
// The engine needs less than a microsecond for such a call, and a group written in Python four more to
// number, check, record and wait for it. The fast path does the same in one native call, and waits in
// another, under the GIL and on the group's own objects (its recorder, its calls in flight). Nobody else
// can tell which path a call took.
//
// Everything unusual takes the slow path: `sum`, `mean` and `barrier` return None without having done
// anything, and a `FastPathWork` that does not end within a millisecond creates the group's own `Work`,
// which has deadlines and diagnosis.
//
// Tensors are read through DLPack's exchange table, whose ABI is stable, so torch's headers are not
// needed.

#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>  // includes nothing itself

#include "engine.hpp"
#include "tensor.hpp"

namespace phalanx {

// Direct access to an attribute of a class with `__slots__`.
class Slot {
 public:
  Slot() = default;
  Slot(PyTypeObject* type, const char* name);  // throws if the class has no such slot

  nanobind::object get(PyObject* self) const {
    return nanobind::steal(PyMember_GetOne(reinterpret_cast<const char*>(self), member_));
  }
  void set(PyObject* self, PyObject* value) const {
    PyMember_SetOne(reinterpret_cast<char*>(self), member_, value);
  }

 private:
  PyMemberDef* member_ = nullptr;
};

// A value in the dictionary of a module, which lives as long as the process. It is looked up again only
// when the dictionary has changed, since a lookup is 1% of a call.
class ModuleValue {
 public:
  ModuleValue() = default;
  ModuleValue(PyObject* dictionary, PyObject* name) : dictionary_(dictionary), name_(name) {}

  // Borrowed; null if there is no such value.
  PyObject* get() {
#if PY_VERSION_HEX < 0x030C0000  // the tag is deprecated in later versions
    const std::uint64_t version = reinterpret_cast<PyDictObject*>(dictionary_)->ma_version_tag;
    if (version == version_) return value_;
    version_ = version;
#endif
    return value_ = PyDict_GetItemWithError(dictionary_, name_);
  }

 private:
  PyObject* dictionary_ = nullptr;
  PyObject* name_ = nullptr;
  PyObject* value_ = nullptr;
  std::uint64_t version_ = 0;  // of no dictionary
};

// What all groups of the process share. Its Python objects live as long as the process.
struct Runtime {
  PyTypeObject* call_type = nullptr;
  struct {
    Slot sequence, operation, dtype, shape, tensors, started, ended, code, instruction, transfer;
  } call;
  Slot collectives, starting;          // of a recorder
  PyObject* files = nullptr;           // a dictionary of file names: whether the file is internal
  PyObject* user_frame = nullptr;      // a function that finds the user's frame
  ModuleValue fault_points;            // a tuple of those that are armed
  ModuleValue is_profiling;            // whether torch's profiler runs
  PyObject* work_type = nullptr;
  PyObject* tensor_types = nullptr;    // a tuple of the classes of plain tensors
  PyObject* strided = nullptr;
  PyObject* dtypes = nullptr;          // a tuple of torch's types, indexed by DType
  Py_ssize_t max_in_flight = 0;        // beyond it, the slow path looks for finished calls
  int (*inspect)(void* tensor, void* result) = nullptr;  // of DLPack's exchange table
};
extern Runtime runtime;

// Whether an object is a dense tensor of a plain class.
bool is_plain_tensor(PyObject* object);

// Reads a plain tensor. Returns false if it is not in CPU memory or cannot be read as it is; a Python
// error may be set then.
bool read_tensor(PyObject* tensor, DlTensor& result);

// Whether tests have armed fault points, which are on the slow path.
bool has_fault_points();

// Whether torch's profiler runs, for which the slow path records calls.
bool has_profiler();

double monotonic_seconds();  // the clock of `time.monotonic`

// The number of forks between the first process and this one. An engine belongs to one process.
int forks();

struct FastPath {
  PyObject_HEAD
  Engine* engine;         // null when the group is closed
  int forks_at_creation;
  PyObject* native;       // keeps `engine` alive
  PyObject* owner;        // the Python object around the engine
  PyObject* is_locked;    // the `locked` method of the group's issue lock
  PyObject* recorder;
  PyObject* append;       // of the recorder's calls
  PyObject* in_flight;    // a dictionary from calls to works
  PyObject* make_work;    // makes a `Work` from a `FastPathWork`
  PyObject* timeout;      // seconds
};

struct FastPathWork {
  PyObject_HEAD
  PyObject* weak_references;
  FastPath* fast_path;
  Engine* engine;
  PyObject* owner;  // keeps `engine` alive
  PyObject* call;
  PyObject* tensor;  // null for a barrier
  PyObject* timeout;
  PyObject* full_work;  // the group's `Work`, once it was needed
  std::uint64_t ticket;
  bool settled;
};

// Creates the work of a call that is about to be issued; throws `python_error`.
FastPathWork* new_work(FastPath* fast_path, PyObject* call, PyObject* tensor);

void register_fast_path_work(nanobind::module_& module);
void register_fast_path(nanobind::module_& module);
void register_flatten(nanobind::module_& module);

}  // namespace phalanx
