#include "region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#ifndef MADV_POPULATE_WRITE  // the headers may be older than the kernel
#define MADV_POPULATE_WRITE 23
#endif

namespace phalanx {

namespace {

constexpr std::uint32_t kVersion = 5;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

[[noreturn]] void refuse(const std::string& path) {
  throw std::runtime_error(path + " is not this group's region");
}

std::uint64_t random_number() {
  std::uint64_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != sizeof value) fail("getrandom");
  return value | 1;  // never zero, the initial value of `present`
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// A new file, removed again unless a region takes it over.
struct File {
  int fd = -1;
  std::string path;
  bool named = false;  // has a name in a directory

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (named) ::unlink(path.c_str());
    if (fd >= 0) ::close(fd);
  }
};

void create_file(File& file, const std::string& where) {
  if (where == "memfd") {
    file.fd = ::memfd_create("phalanx", MFD_CLOEXEC);
    if (file.fd < 0) fail("memfd_create");
    // Reachable for processes of the same user only, and it leaves no name.
    file.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file.fd);
    return;
  }
  file.path = where + "/phalanx-" + hex(random_number()) + hex(random_number());
  file.fd = ::open(file.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file.fd < 0) fail("cannot create a file in " + where);
  file.named = true;
}

}  // namespace

Layout::Layout(int ranks_, const Sizes& sizes_) : ranks(ranks_), sizes(sizes_) {
  const auto n = static_cast<std::size_t>(ranks);
  control = sizeof(Header);
  small = control + n * sizeof(Control);
  windows = round_up(small + n * (kRingSize * sizes.small + kStagger), kPage);
  channels = round_up(windows + n * (sizes.windows * sizes.window + kStagger), kPage);
  slabs = round_up(channels + n * n * (sizeof(Channel) + sizes.channel), kPage);
  total = slabs + n * (sizes.slab + kStagger);
}

// Takes the descriptor over unless it throws.
Region::Region(int& fd, Layout layout) : layout_(layout) {
  void* base =
      ::mmap(nullptr, layout_.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) fail("cannot map " + std::to_string(layout_.total) + " bytes");
  base_ = static_cast<char*>(base);
  fd_ = std::exchange(fd, -1);
  // Linux 5.14 and later. Populates the page of the header, which is needed anyway.
  can_populate_ = ::sysconf(_SC_PAGESIZE) == static_cast<long>(kPage) &&
             ::madvise(base_, kPage, MADV_POPULATE_WRITE) == 0;
}

void Region::close_descriptor() noexcept {
  if (!can_populate_ || fd_ < 0) return;
  ::close(fd_);
  fd_ = -1;
}

Region::Region(Region&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      can_populate_(other.can_populate_),
      path_(std::exchange(other.path_, {})),
      layout_(other.layout_),
      base_(std::exchange(other.base_, nullptr)),
      creator_pid_(other.creator_pid_),
      owner_(other.owner_) {}

Region Region::alias() const {
  Region same(layout_);
  same.fd_ = fd_;
  same.can_populate_ = can_populate_;
  same.base_ = base_;
  same.owner_ = false;
  return same;
}

Region::~Region() {
  if (!owner_) return;
  if (::getpid() == creator_pid_) unlink();  // not in a forked child
  if (base_ != nullptr) ::munmap(base_, layout_.total);
  if (fd_ >= 0) ::close(fd_);
}

Region Region::create(const std::string& where, int ranks, const Sizes& sizes) {
  const Layout layout(ranks, sizes);
  File file;
  create_file(file, where);
  if (::ftruncate(file.fd, static_cast<off_t>(layout.total)) != 0) fail("ftruncate");
  // Allocate all but the slabs now: a full file system is an error here and would be a SIGBUS later. A
  // memfd is limited only by the machine's memory, and clearing it at once would dominate group creation.
  if (const int error =
          file.named ? ::posix_fallocate(file.fd, 0, static_cast<off_t>(layout.slabs)) : 0) {
    errno = error;
    fail("cannot allocate " + std::to_string(layout.slabs) + " bytes in " + where);
  }
  Region region(file.fd, layout);
  for (int rank = 0; rank < ranks; ++rank) {
    auto* control = new (&region.control(rank)) Control;
    control->left_at.publish(kNever);
  }
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to) new (region.bytes(layout.channel(from, to))) Channel;
  auto* header = new (&region.header()) Header;
  header->token = random_number();
  header->ranks = static_cast<std::uint32_t>(ranks);
  header->version = kVersion;
  header->magic = kMagic;
  region.path_ = std::move(file.path);
  region.creator_pid_ = ::getpid();
  file.named = false;
  return region;
}

Region Region::open(const std::string& path, std::uint64_t token, int ranks, const Sizes& sizes) {
  File file;
  file.fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file.fd < 0) fail("cannot open " + path);
  struct stat status {};
  const Layout layout(ranks, sizes);
  if (::fstat(file.fd, &status) != 0 || status.st_uid != ::geteuid() ||
      static_cast<std::size_t>(status.st_size) != layout.total)
    refuse(path);
  Region region(file.fd, layout);
  const Header& header = region.header();
  if (header.magic != kMagic || header.version != kVersion || header.token != token ||
      header.ranks != static_cast<std::uint32_t>(ranks))
    refuse(path);
  region.close_descriptor();
  return region;
}

void Region::unlink() {
  if (!path_.empty() && !path_.starts_with("/proc/")) ::unlink(path_.c_str());
  path_.clear();
  close_descriptor();
}

std::uint64_t Region::offset_of(const void* address, std::size_t length) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(base_);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at < begin + layout_.slabs || at + length > begin + layout_.total) return kNever;
  return at - begin;
}

void Region::reserve(std::size_t offset, std::size_t length) {
  int error = 0;
  if (!can_populate_) {
    error = ::posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(length));
  } else if (::madvise(bytes(offset), length, MADV_POPULATE_WRITE) != 0) {
    error = errno == EFAULT ? ENOSPC : errno;  // a touch would raise SIGBUS
    release(offset, length);
  }
  if (error == 0) return;
  errno = error;
  fail("cannot allocate " + std::to_string(length) + " bytes of shared memory");
}

void Region::release(std::size_t offset, std::size_t length) noexcept {
  if (can_populate_) {
    ::madvise(bytes(offset), length, MADV_REMOVE);
    return;
  }
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(length));
}

}  // namespace phalanx
