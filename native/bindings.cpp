// What Python sees of the engine: addresses and numbers, nothing of torch.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "engine.hpp"
#include "extent.hpp"
#include "shortcut.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

namespace {

using Address = std::uintptr_t;

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

// Waiting and moving memory need nothing of Python; other threads may run meanwhile.
template <class Function>
auto unlocked(Function&& function) {
  const nb::gil_scoped_release release;
  return function();
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

std::uint64_t nanoseconds(double seconds) {
  return seconds <= 0 ? 0 : static_cast<std::uint64_t>(seconds * 1e9);
}

std::tuple<int, int, int> told(const Verdict& verdict) {
  return {static_cast<int>(verdict.outcome), verdict.first, verdict.second};
}

std::tuple<int, int, std::uint64_t> told(const Transfers::Status& status) {
  return {static_cast<int>(status.state), status.peer, status.bytes};
}

// Starts something on behalf of `work`, which keeps the memory alive, and tells it the ticket. A
// signal may raise an exception in Python as soon as this returns, before anything is done with what
// it returns. So the work is in `begun` before the engine gets the memory, and has its ticket before
// Python runs again. If the engine throws, it has changed nothing, and the work is taken out again.
template <class Start>
std::uint64_t begin(nb::list& begun, nb::handle work, Start&& start) {
  begun.append(work);
  std::uint64_t ticket = 0;
  try {
    ticket = unlocked(std::forward<Start>(start));
  } catch (...) {
    nb::del(begun[nb::len(begun) - 1]);
    throw;
  }
  nb::setattr(work, "ticket", nb::int_(ticket));
  return ticket;
}

std::uint64_t issue(Engine& engine, int kind, int type, int op, double factor, int root,
                    Address input, std::size_t bytes, std::uint64_t amount, nb::handle shape,
                    const std::vector<Address>& outputs, std::size_t output_bytes,
                    std::vector<std::uint64_t> send_at, std::vector<std::uint64_t> receive_at,
                    nb::list begun, nb::handle work) {
  Request request;
  request.kind = static_cast<Kind>(kind);
  request.reduction = {static_cast<DType>(type), static_cast<ReduceOp>(op), factor};
  request.root = root;
  request.input = pointer(input);
  request.bytes = bytes;
  request.extent = extent_of(amount, shape);
  request.output_bytes = output_bytes;
  for (const Address output : outputs) request.outputs.push_back(pointer(output));
  request.send_at = std::move(send_at);
  request.receive_at = std::move(receive_at);
  return begin(begun, work, [&] { return engine.issue(std::move(request)); });
}

// The call of calls: an all-reduce, or anything else that works in place.
std::uint64_t issue_in_place(Engine& engine, int kind, int type, int op, double factor, int root,
                             Address tensor, std::size_t bytes, nb::handle shape,
                             nb::list begun, nb::handle work) {
  Request request;
  request.kind = static_cast<Kind>(kind);
  request.reduction = {static_cast<DType>(type), static_cast<ReduceOp>(op), factor};
  request.root = root;
  request.input = pointer(tensor);
  request.bytes = request.output_bytes = bytes;
  request.extent = extent_of(bytes, shape);
  request.outputs.push_back(request.input);
  return begin(begun, work, [&] { return engine.issue(std::move(request)); });
}

// When the interpreter goes away it ends threads that come back to it, by unwinding their stacks. Under
// C++ code that must not be unwound (pybind11's, nanobind's, torch's callbacks) this is `terminate`, and
// the whole process aborts. From here on such a thread sleeps instead, until the process has ended.
void park_dying_threads() {
  static std::terminate_handler usual = nullptr;
  static const pid_t process = ::getpid();
  if (usual != nullptr) return;
  usual = std::set_terminate([] {
    const bool other = ::gettid() != ::getpid() && ::getpid() == process;
    while (other && is_finalizing()) ::pause();
    usual();
  });
}

}  // namespace

NB_MODULE(_engine, module) {
  module.doc() = "The shared-memory engine.";
  // A group that was not shut down lives as long as the interpreter, which is nobody's bug.
  nb::set_leak_warnings(false);
  module.attr("MAX_RANKS") = kMaxRanks;
  module.def("stream_bytes", [](Address into, Address from, std::size_t bytes) {
    unlocked([&] { stream_bytes(pointer(into), pointer(from), bytes); });
  });
  module.def("park_dying_threads", &park_dying_threads);
  module.def("instruction_set", &instruction_set);

  nb::class_<Sizes>(module, "Sizes")
      .def(nb::init<>())
      .def_rw("small", &Sizes::small)
      .def_rw("window", &Sizes::window)
      .def_rw("windows", &Sizes::windows)
      .def_rw("channel", &Sizes::channel)
      .def_rw("piece", &Sizes::piece)
      .def_rw("streamed", &Sizes::streamed)
      .def_rw("slab", &Sizes::slab);

  nb::class_<Process>(module, "Process", nb::is_weak_referenceable()).def(nb::init<int>(), "pidfd"_a);

  nb::class_<Region>(module, "Region")
      .def_static("create", &Region::create, "where"_a, "ranks"_a, "sizes"_a)
      .def_static("open", &Region::open, "path"_a, "token"_a, "ranks"_a, "sizes"_a)
      .def("unlink", &Region::unlink)
      .def("present",
           [](const Region& region, int rank) {
             return region.control(rank).present.read() == region.token();
           })
      .def("slab",
           [](const Region& region, int rank) {
             return std::tuple(reinterpret_cast<Address>(region.bytes(region.layout().slab(rank))),
                               region.layout().sizes.slab);
           })
      .def("reserve",
           [](Region& region, Address address, std::size_t length) {
             const std::uint64_t offset = region.offset_of(pointer(address), length);
             if (offset == kNever) throw std::out_of_range("not in this region");
             unlocked([&] { region.reserve(offset, length); });
           })
      .def("give_back",
           [](Region& region, Address address, std::size_t length) {
             const std::uint64_t offset = region.offset_of(pointer(address), length);
             if (offset != kNever) region.give_back(offset, length);
           })
      .def_prop_ro("path", &Region::path)
      .def_prop_ro("token", &Region::token);

  nb::class_<Engine>(module, "Engine")
      .def("__init__",
           [](Engine* self, Region& region, int rank, int cores) {
             new (self) Engine(std::move(region), rank, cores);  // the region moves in
           })
      .def("share_cores", &Engine::share_cores)
      .def_prop_ro("cores", &Engine::cores)
      .def("watch", [](Engine& engine, int rank, std::shared_ptr<Process> process) {
        engine.watch(rank, std::move(process));
      })
      .def("mark_present", &Engine::mark_present)
      .def("start_driver", &Engine::start_driver)
      .def("stop_driver", [](Engine& engine) { unlocked([&] { engine.stop_driver(); }); })
      .def_prop_ro("has_driver", &Engine::has_driver)
      .def("issue", &issue)
      .def("issue_in_place", &issue_in_place)
      .def("test",
           [](Engine& engine, std::uint64_t ticket) {
             return told(unlocked([&] { return engine.test(ticket); }));
           })
      .def("wait",
           [](Engine& engine, std::uint64_t ticket, double seconds) {
             return told(unlocked([&] { return engine.wait(ticket, nanoseconds(seconds)); }));
           })
      .def("send",
           [](Engine& engine, int to, std::int64_t tag, Address data, std::size_t bytes,
              nb::list begun, nb::handle work) {
             return begin(begun, work, [&] { return engine.send(to, tag, pointer(data), bytes); });
           })
      .def("receive",
           [](Engine& engine, int from, std::int64_t tag, Address data, std::size_t bytes,
              nb::list begun, nb::handle work) {
             return begin(begun, work,
                          [&] { return engine.receive(from, tag, pointer(data), bytes); });
           })
      .def("test_transfer",
           [](Engine& engine, std::uint64_t ticket) {
             return told(unlocked([&] { return engine.test_transfer(ticket); }));
           })
      .def("wait_transfer",
           [](Engine& engine, std::uint64_t ticket, double seconds) {
             return told(
                 unlocked([&] { return engine.wait_transfer(ticket, nanoseconds(seconds)); }));
           })
      .def("forget_transfer",
           [](Engine& engine, std::uint64_t ticket) {
             unlocked([&] { engine.forget_transfer(ticket); });
           })
      .def("cancel_transfer",
           [](Engine& engine, std::uint64_t ticket) {
             return unlocked([&] { return engine.cancel_transfer(ticket); });
           })
      .def_prop_ro("transfers_kept", &Engine::transfers_kept)
      .def("dead", &Engine::dead)
      .def("members", &Engine::members)
      .def("leave", &Engine::leave)
      .def("rejoin",
           [](Engine& engine, std::uint64_t calls, double seconds) {
             const Engine::Entry entry =
                 unlocked([&] { return engine.rejoin(calls, nanoseconds(seconds)); });
             return std::tuple(static_cast<int>(entry.stage), entry.calls);
           })
      .def("awaited", [](Engine& engine) { return unlocked([&] { return engine.awaited(); }); })
      .def("forget", &Engine::forget)
      .def("abort", &Engine::abort)
      .def_prop_ro("is_untouched", &Engine::is_untouched)
      .def_prop_ro("region", &Engine::region, nb::rv_policy::reference_internal);

  add_work(module);
  add_shortcut(module);
  add_gathering(module);
}
