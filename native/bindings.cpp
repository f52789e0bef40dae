// The Python module: addresses and numbers, without torch.

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "fast_path.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace phalanx;

namespace {

using Address = std::uintptr_t;

char* pointer(Address address) { return reinterpret_cast<char*>(address); }

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

std::tuple<int, int, int> as_tuple(const Result& result) {
  return {static_cast<int>(result.outcome), result.first, result.second};
}

std::tuple<int, int, std::uint64_t> as_tuple(const Transfers::Status& status) {
  return {static_cast<int>(status.state), status.peer, status.bytes};
}

// Starts an operation for `work`, which keeps the memory alive and gets the ticket. A signal may raise
// an exception in Python as soon as this returns, before the caller can store the result. So the work
// is in `started` before the engine gets the memory, and has its ticket before Python code runs again.
// If the engine throws, it has changed nothing, and the work is removed.
template <class Function>
std::uint64_t start(nb::list& started, nb::handle work, Function&& function) {
  started.append(work);
  std::uint64_t ticket = 0;
  try {
    const nb::gil_scoped_release release;
    ticket = function();
  } catch (...) {
    nb::del(started[nb::len(started) - 1]);
    throw;
  }
  nb::setattr(work, "ticket", nb::int_(ticket));
  return ticket;
}

Request request_of(int kind, int type, int op, int root) {
  Request request;
  request.kind = static_cast<Collective>(kind);
  request.reduction = {static_cast<DType>(type), static_cast<ReduceOp>(op)};
  request.root = root;
  return request;
}

std::uint64_t issue(Engine& engine, int kind, int type, int op, int root,
                    Address input, std::size_t bytes, std::uint64_t amount, nb::handle shape,
                    const std::vector<Address>& outputs, std::size_t output_bytes,
                    std::vector<std::uint64_t> send_at, std::vector<std::uint64_t> receive_at,
                    nb::list started, nb::handle work) {
  Request request = request_of(kind, type, op, root);
  request.input = pointer(input);
  request.bytes = bytes;
  request.fingerprint = fingerprint_of(amount, shape);
  request.output_bytes = output_bytes;
  for (const Address output : outputs) request.outputs.push_back(pointer(output));
  request.send_at = std::move(send_at);
  request.receive_at = std::move(receive_at);
  return start(started, work, [&] { return engine.issue(std::move(request)); });
}

// For allreduce, reduce, broadcast and barrier.
std::uint64_t issue_in_place(Engine& engine, int kind, int type, int op, int root,
                             Address tensor, std::size_t bytes, nb::handle shape,
                             nb::list started, nb::handle work) {
  Request request = request_of(kind, type, op, root);
  request.input = pointer(tensor);
  request.bytes = request.output_bytes = bytes;
  request.fingerprint = fingerprint_of(bytes, shape);
  request.outputs.push_back(request.input);
  return start(started, work, [&] { return engine.issue(std::move(request)); });
}

// Converts the numbers of a tree; no tree has one that does not fit.
template <class T>
std::vector<T> as_small(const std::vector<std::int64_t>& numbers) {
  std::vector<T> small;
  small.reserve(numbers.size());
  for (const std::int64_t number : numbers) {
    if (number < 0 || number > std::numeric_limits<T>::max())
      throw std::invalid_argument("a number of inputs or merges is out of range");
    small.push_back(static_cast<T>(number));
  }
  return small;
}

// The first of `slots` is for the result, the others are inputs. Large ones must be in the region. Peers
// may read as many as any rank has inputs.
std::uint64_t issue_ordered(Engine& engine, int type, Address first_slot, std::size_t slot_bytes,
                            std::size_t slots, std::size_t output_bytes,
                            const std::vector<std::int64_t>& tree_inputs,
                            const std::vector<std::int64_t>& merges, double divisor,
                            nb::handle shape, nb::list started, nb::handle work) {
  const auto tree = std::make_shared<Tree>();
  tree->inputs = as_small<std::uint16_t>(tree_inputs);
  tree->merges = as_small<std::uint8_t>(merges);
  tree->slot_bytes = slot_bytes;
  const auto most = std::max_element(tree->inputs.begin(), tree->inputs.end());
  const std::size_t inputs = slots == 0 ? 0 : slots - 1;
  const std::size_t used = most == tree->inputs.end() ? 0 : std::min<std::size_t>(*most, inputs);
  Request request;
  request.kind = Collective::ordered_allreduce;
  request.reduction = {static_cast<DType>(type), ReduceOp::sum, divisor};
  request.outputs.push_back(pointer(first_slot));
  request.input = request.outputs[0] + slot_bytes;
  request.bytes = used == 0 ? 0 : (used - 1) * slot_bytes + output_bytes;
  request.output_bytes = output_bytes;
  request.fingerprint = fingerprint_of(output_bytes, shape);
  request.tree = tree;
  if (const char* const error = engine.tree_error(request)) throw std::invalid_argument(error);
  return start(started, work, [&] { return engine.issue(std::move(request)); });
}

void sum_tree_into(Address into, const std::vector<Address>& inputs,
                   const std::vector<std::int64_t>& merges, int type, std::size_t count,
                   double divisor) {
  const std::vector<std::uint8_t> order = as_small<std::uint8_t>(merges);
  const auto of = static_cast<DType>(type);
  if (type < 0 || type >= kDTypes || !supports_tree(of))
    throw std::invalid_argument("the element type must be float or complex");
  if (!is_tree(order)) throw std::invalid_argument("merges must leave one sum");
  if (inputs.size() != order.size())
    throw std::invalid_argument("merges must have one number per input");
  if (!is_tree_divisor(divisor)) throw std::invalid_argument("divisor must be from 2^-126 to 2^126");
  std::vector<const void*> in;
  for (const Address input : inputs) in.push_back(pointer(input));
  void* const out = pointer(into);
  const nb::gil_scoped_release release;
  sum_tree(of, in, order, divisor, {&out, 1}, count);
}

template <class Enum>
using Names = std::initializer_list<std::pair<const char*, Enum>>;

template <class Enum>
nb::dict to_dict(Names<Enum> names) {
  nb::dict values;
  for (const auto& [name, value] : names) values[name] = static_cast<int>(value);
  return values;
}

// Exports an enum as a class with integer attributes: calls take and return plain integers, which are
// faster to convert and compare than Python enums.
template <class Enum>
void add_constants(nb::module_& module, const char* name, Names<Enum> names) {
  nb::dict members = to_dict(names);
  members["__module__"] = module.attr("__name__");
  const nb::handle type(reinterpret_cast<PyObject*>(&PyType_Type));
  module.attr(name) = type(name, nb::tuple(), members);
}

void export_constants(nb::module_& module) {
  module.attr("MAX_RANKS") = kMaxRanks;
  module.attr("MAX_TREE_INPUTS") = kMaxTreeInputs;
  module.attr("DTYPES") = to_dict<DType>(
      {{"float32", DType::float32},     {"float64", DType::float64}, {"float16", DType::float16},
       {"bfloat16", DType::bfloat16},   {"int8", DType::int8},       {"int16", DType::int16},
       {"int32", DType::int32},         {"int64", DType::int64},     {"uint8", DType::uint8},
       {"uint16", DType::uint16},       {"uint32", DType::uint32},   {"uint64", DType::uint64},
       {"bool", DType::boolean},        {"complex64", DType::complex64},
       {"complex128", DType::complex128}});
  using Op = ReduceOp;
  add_constants<Op>(module, "ReduceOp",
                    {{"SUM", Op::sum}, {"AVG", Op::avg}, {"PRODUCT", Op::product},
                     {"MIN", Op::min}, {"MAX", Op::max}, {"BAND", Op::band},
                     {"BOR", Op::bor}, {"BXOR", Op::bxor}, {"PREMUL_SUM", Op::premul_sum}});
  using C = Collective;
  add_constants<C>(module, "Collective",
                   {{"BARRIER", C::barrier}, {"ALLREDUCE", C::allreduce}, {"REDUCE", C::reduce},
                    {"BROADCAST", C::broadcast}, {"ALLGATHER", C::allgather}, {"GATHER", C::gather},
                    {"SCATTER", C::scatter}, {"REDUCE_SCATTER", C::reduce_scatter},
                    {"ALLTOALL", C::alltoall}, {"ORDERED_ALLREDUCE", C::ordered_allreduce}});
  add_constants<Outcome>(module, "Outcome",
                         {{"PENDING", Outcome::pending}, {"FINISHED", Outcome::finished},
                          {"DEAD", Outcome::dead}, {"MISMATCH", Outcome::mismatch},
                          {"ABORTED", Outcome::aborted}, {"ROOT_LEFT", Outcome::root_left},
                          {"TORN", Outcome::torn}});
  using State = Transfers::State;
  add_constants<State>(module, "TransferState",
                       {{"PENDING", State::pending}, {"FINISHED", State::finished},
                        {"WRONG_SIZE", State::wrong_size}, {"CANCELLED", State::cancelled},
                        {"STARVED", State::starved}, {"STOPPED", State::stopped}});
  using Stage = Engine::RejoinStage;
  add_constants<Stage>(module, "RejoinStage",
                       {{"OUTSIDE", Stage::outside}, {"WAITING", Stage::waiting},
                        {"ENTERING", Stage::entering}, {"ENTERED", Stage::entered}});
}

// A finalizing interpreter ends threads that return to it by unwinding their stacks. Through C++ code
// that must not be unwound (pybind11's, nanobind's, torch's callbacks) that calls `terminate`, and the
// process aborts. After this call, such a thread sleeps until the process has ended.
void park_dying_threads() {
  static std::terminate_handler previous = nullptr;
  static const pid_t process = ::getpid();
  if (previous != nullptr) return;
  previous = std::set_terminate([] {
    const bool other = ::gettid() != ::getpid() && ::getpid() == process;
    while (other && is_finalizing()) ::pause();
    previous();
  });
}

}  // namespace

NB_MODULE(_engine, module) {
  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  module.doc() = "The shared-memory engine.";
  // A group that was not shut down lives as long as the interpreter.
  nb::set_leak_warnings(false);
  export_constants(module);
  module.def("stream_bytes",
             [](Address into, Address from, std::size_t bytes) {
               stream_bytes(pointer(into), pointer(from), bytes);
             },
             NoGil());
  module.def("sum_tree", &sum_tree_into, "into"_a, "inputs"_a, "merges"_a, "type"_a, "count"_a,
             "divisor"_a);
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
             if (offset == kNever) throw std::out_of_range("address is not in this region");
             const nb::gil_scoped_release release;
             region.reserve(offset, length);
           })
      .def("release",
           [](Region& region, Address address, std::size_t length) {
             const std::uint64_t offset = region.offset_of(pointer(address), length);
             if (offset != kNever) region.release(offset, length);
           })
      .def_prop_ro("path", &Region::path)
      .def_prop_ro("token", &Region::token);

  nb::class_<Engine>(module, "Engine")
      .def("__init__",
           [](Engine* self, Region& region, int rank, int cores) {
             new (self) Engine(std::move(region), rank, cores);
           })
      .def("set_cores", &Engine::set_cores)
      .def_prop_ro("cores", &Engine::cores)
      .def("watch", [](Engine& engine, int rank, std::shared_ptr<Process> process) {
        engine.watch(rank, std::move(process));
      })
      .def("mark_present", &Engine::mark_present)
      .def("start_driver", &Engine::start_driver)
      .def("stop_driver", &Engine::stop_driver, NoGil())
      .def_prop_ro("has_driver", &Engine::has_driver)
      .def("issue", &issue)
      .def("issue_in_place", &issue_in_place)
      .def("issue_ordered", &issue_ordered)
      .def("test", [](Engine& engine, std::uint64_t ticket) { return as_tuple(engine.test(ticket)); },
           NoGil())
      .def("wait",
           [](Engine& engine, std::uint64_t ticket, double seconds) {
             return as_tuple(engine.wait(ticket, nanoseconds(seconds)));
           },
           NoGil())
      .def("send",
           [](Engine& engine, int to, std::int64_t tag, Address data, std::size_t bytes,
              nb::list started, nb::handle work) {
             return start(started, work, [&] { return engine.send(to, tag, pointer(data), bytes); });
           })
      .def("receive",
           [](Engine& engine, int from, std::int64_t tag, Address data, std::size_t bytes,
              nb::list started, nb::handle work) {
             return start(started, work,
                          [&] { return engine.receive(from, tag, pointer(data), bytes); });
           })
      .def("test_transfer",
           [](Engine& engine, std::uint64_t ticket) {
             return as_tuple(engine.test_transfer(ticket));
           },
           NoGil())
      .def("wait_transfer",
           [](Engine& engine, std::uint64_t ticket, double seconds) {
             return as_tuple(engine.wait_transfer(ticket, nanoseconds(seconds)));
           },
           NoGil())
      .def("detach_transfer", &Engine::detach_transfer, NoGil())
      .def("cancel_transfer", &Engine::cancel_transfer, NoGil())
      .def_prop_ro("transfers_kept", &Engine::transfers_kept)
      .def("dead_ranks", &Engine::dead_ranks)
      .def("members", &Engine::members)
      .def("leave", &Engine::leave)
      .def("rejoin",
           [](Engine& engine, std::uint64_t calls, double seconds) {
             const Engine::RejoinStatus status = engine.rejoin(calls, nanoseconds(seconds));
             return std::tuple(static_cast<int>(status.stage), status.calls);
           },
           NoGil())
      .def("missing_in_rejoin", &Engine::missing_in_rejoin, NoGil())
      .def("exclude", &Engine::exclude)
      .def("abort", &Engine::abort)
      .def_prop_ro("is_quiescent", &Engine::is_quiescent)
      .def_prop_ro("region", &Engine::region, nb::rv_policy::reference_internal);

  register_fast_path_work(module);
  register_fast_path(module);
  register_flatten(module);
}
