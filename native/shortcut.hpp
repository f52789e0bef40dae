// The short way of the calls that programs make most: a plain sum of one tensor, and a barrier.
//
// Such a call takes the engine less than a microsecond, and a group written in Python four more to
// number, check, record and wait for it. Here the same is done in one native call, and another one
// waits: under the interpreter's lock, on the group's own objects (its recorder, its record of what
// is under way), so that nobody else can tell which way a call came.
//
// Whatever is out of the ordinary goes the group's long way: `sum` and `barrier` return None, with
// nothing done, and a `ShortWork` that does not end within a moment grows into the group's own
// `Work`, which has deadlines, looks around and explains itself. So nothing of that is here.
//
// No header of torch is needed: tensors tell what they are through DLPack's exchange table, which
// is part of that standard's ABI.

#pragma once

#include <nanobind/nanobind.h>
#include <structmember.h>  // after it, for it includes nothing itself

#include "engine.hpp"

namespace phalanx {

// Where an attribute of a class with `__slots__` is kept, which saves looking for it each time.
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

// What all groups of the process share. Python objects in it live as long as the process.
struct Known {
  PyTypeObject* call_type = nullptr;  // `_record.Call`
  struct {
    Slot sequence, operation, dtype, shape, tensors, started, ended, code, instruction, transfer;
  } call;
  Slot collectives, starting;        // of a `_record.Recorder`
  PyObject* files = nullptr;         // `_record`'s dictionary: is this file internal?
  PyObject* user_frame = nullptr;    // `_record`'s search for the user's frame
  PyObject* fault_points = nullptr;  // the dictionary of that module
  PyObject* work_type = nullptr;     // `_work.Work`
  PyObject* tensor_types = nullptr;  // a tuple: the classes whose tensors are nothing special
  PyObject* strided = nullptr;
  PyObject* dtypes = nullptr;        // a tuple: torch's for each of ours
  int (*inspect)(void* tensor, void* told) = nullptr;  // DLPack's, of torch
};
extern Known known;

// Tells whether an object is a tensor, dense, and of no class of its own.
bool is_a_plain_tensor(PyObject* object);

// Tells whether tests have armed fault points, which are all on the long way.
bool has_fault_points();

double seconds_now();  // as `time.monotonic` tells them

// How often this process has become a child: an engine belongs to the process that made it.
int forks();

// One group's.
struct Shortcut {
  PyObject_HEAD
  Engine* engine;       // null when the group is closed
  int made_after;       // that many forks
  PyObject* native;     // what keeps `engine`
  PyObject* owner;      // the engine's Python side
  PyObject* is_ordered; // the `locked` of the lock that orders calls
  PyObject* recorder;
  PyObject* append;     // of its calls
  PyObject* in_flight;  // a dictionary, from calls to works
  PyObject* grow;       // makes a `Work` of a `ShortWork`
  PyObject* timeout;    // seconds that a call may take
};

// One call of it, under way or done.
struct ShortWork {
  PyObject_HEAD
  PyObject* weak_references;
  Shortcut* shortcut;
  Engine* engine;
  PyObject* owner;  // keeps `engine`
  PyObject* call;
  PyObject* tensor;  // null for a barrier
  PyObject* timeout;
  PyObject* grown;  // the `Work`, once somebody has needed it
  std::uint64_t ticket;
  bool settled;
};

// Makes the work of a call that has yet to be issued; throws what Python raised.
ShortWork* new_work(Shortcut* shortcut, PyObject* call, PyObject* tensor);

void add_work(nanobind::module_& module);
void add_shortcut(nanobind::module_& module);
void add_gathering(nanobind::module_& module);

}  // namespace phalanx
