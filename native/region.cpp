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

#ifndef MADV_POPULATE_WRITE  // headers older than the kernel that may run this
#define MADV_POPULATE_WRITE 23
#endif

namespace phalanx {

namespace {

constexpr std::uint32_t kVersion = 4;

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t random_number() {
  std::uint64_t value = 0;
  if (::getrandom(&value, sizeof value, 0) != sizeof value) fail("getrandom");
  return value | 1;  // never zero, which means "not there yet"
}

std::string hex(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

// A file that is being made: it and its name are gone again unless a region takes them over.
struct File {
  int fd = -1;
  std::string path;    // where others open it
  bool named = false;  // in a folder

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (named) ::unlink(path.c_str());
    if (fd >= 0) ::close(fd);
  }
};

void make(File& file, const std::string& where) {
  if (where == "memfd") {
    file.fd = ::memfd_create("phalanx", MFD_CLOEXEC);
    if (file.fd < 0) fail("memfd_create");
    // Another process of the same user reaches it here; nobody else may, and no name is left over.
    file.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file.fd);
    return;
  }
  file.path = where + "/phalanx-" + hex(random_number()) + hex(random_number());
  file.fd = ::open(file.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file.fd < 0) fail("cannot make a file in " + where);
  file.named = true;
}

}  // namespace

Layout::Layout(int ranks_, const Sizes& sizes_) : ranks(ranks_), sizes(sizes_) {
  const auto n = static_cast<std::size_t>(ranks);
  control = sizeof(Header);
  small = control + n * sizeof(Control);
  windows = round_up(small + n * (kRing * sizes.small + kStagger), kPage);
  channels = round_up(windows + n * (sizes.windows * sizes.window + kStagger), kPage);
  slabs = round_up(channels + n * n * (sizeof(Channel) + sizes.channel), kPage);
  total = slabs + n * (sizes.slab + kStagger);
}

// The descriptor is taken over when all has gone well.
Region::Region(int& fd, Layout layout) : layout_(layout) {
  void* base =
      ::mmap(nullptr, layout_.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) fail("cannot map " + std::to_string(layout_.total) + " bytes");
  base_ = static_cast<char*>(base);
  fd_ = std::exchange(fd, -1);
  // Linux 5.14 and later. The page is the header's, which is there in any case.
  advises_ = ::sysconf(_SC_PAGESIZE) == static_cast<long>(kPage) &&
             ::madvise(base_, kPage, MADV_POPULATE_WRITE) == 0;
}

void Region::drop_descriptor() noexcept {
  if (!advises_ || fd_ < 0) return;
  ::close(fd_);
  fd_ = -1;
}

Region::Region(Region&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      advises_(other.advises_),
      path_(std::exchange(other.path_, {})),
      layout_(other.layout_),
      base_(std::exchange(other.base_, nullptr)),
      maker_(other.maker_),
      owner_(other.owner_) {}

Region Region::alias() const {
  Region same(layout_);
  same.fd_ = fd_;
  same.advises_ = advises_;
  same.base_ = base_;
  same.owner_ = false;
  return same;
}

Region::~Region() {
  if (!owner_) return;
  if (::getpid() == maker_) unlink();  // a forked child's copy leaves the name alone
  if (base_ != nullptr) ::munmap(base_, layout_.total);
  if (fd_ >= 0) ::close(fd_);
}

Region Region::create(const std::string& where, int ranks, const Sizes& sizes) {
  const Layout layout(ranks, sizes);
  File file;
  make(file, where);
  if (::ftruncate(file.fd, static_cast<off_t>(layout.total)) != 0) fail("ftruncate");
  // All but the slabs is needed, sooner or later. To learn now that a file system has no room for it
  // is an error; to learn it when it is touched would be a SIGBUS. A memfd has no limit but the
  // machine's memory, and to clear it all at once would take longer than the rest of forming a group.
  if (const int error =
          file.named ? ::posix_fallocate(file.fd, 0, static_cast<off_t>(layout.slabs)) : 0) {
    errno = error;
    fail("no room for " + std::to_string(layout.slabs) + " bytes in " + where);
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
  region.maker_ = ::getpid();
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
    throw std::runtime_error("what lies at " + path + " is not this group's region");
  Region region(file.fd, layout);
  const Header& header = region.header();
  if (header.magic != kMagic || header.version != kVersion || header.token != token ||
      header.ranks != static_cast<std::uint32_t>(ranks))
    throw std::runtime_error("what lies at " + path + " is not this group's region");
  region.drop_descriptor();
  return region;
}

void Region::unlink() {
  if (!path_.empty() && !path_.starts_with("/proc/")) ::unlink(path_.c_str());
  path_.clear();
  drop_descriptor();
}

std::uint64_t Region::offset_of(const void* address, std::size_t length) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(base_);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at < begin + layout_.slabs || at + length > begin + layout_.total) return kNever;
  return at - begin;
}

void Region::reserve(std::size_t offset, std::size_t length) {
  if (advises_) {
    if (::madvise(bytes(offset), length, MADV_POPULATE_WRITE) == 0) return;
    const int error = errno == EFAULT ? ENOSPC : errno;  // to touch it would be a SIGBUS
    give_back(offset, length);
    errno = error;
    fail("no memory for " + std::to_string(length) + " shared bytes");
  }
  if (const int error =
          ::posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(length))) {
    errno = error;
    fail("no memory for " + std::to_string(length) + " shared bytes");
  }
}

void Region::give_back(std::size_t offset, std::size_t length) noexcept {
  if (advises_) {
    ::madvise(bytes(offset), length, MADV_REMOVE);
    return;
  }
  ::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(length));
}

}  // namespace phalanx
