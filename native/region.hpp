// The memory that the ranks of a group share: made by one, mapped by all, with no name left behind.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "layout.hpp"

namespace phalanx {

class Region {
 public:
  // Makes a region. `where` is "memfd", or a directory for a file with an unguessable name.
  static Region create(const std::string& where, int ranks, const Sizes& sizes);

  // Maps a region that another rank made; fails unless it is this user's and bears the token.
  static Region open(const std::string& path, std::uint64_t token, int ranks, const Sizes& sizes);

  // The same mapping once more, for a rank that is another thread of this process. It lives as long
  // as the original does. At the same address, ThreadSanitizer sees what ranks do to each other.
  Region alias() const;

  Region(Region&& other) noexcept;
  Region& operator=(Region&&) = delete;
  ~Region();

  const Layout& layout() const { return layout_; }
  const std::string& path() const { return path_; }  // what others open; empty once unlinked
  std::uint64_t token() const { return header().token; }

  // Takes the name away, and the descriptor behind it; whoever has mapped the region keeps it.
  void unlink();

  Header& header() const { return *at<Header>(0); }
  Control& control(int rank) const {
    return *at<Control>(layout_.control + static_cast<std::size_t>(rank) * sizeof(Control));
  }
  char* bytes(std::size_t offset) const { return base_ + offset; }

  // Tells where in the region an address lies; kNever if it does not.
  std::uint64_t offset_of(const void* address, std::size_t length) const;

  // Makes sure that memory stands behind a part of a slab, so that touching it cannot fail later.
  void reserve(std::size_t offset, std::size_t length);
  void give_back(std::size_t offset, std::size_t length) noexcept;

 private:
  explicit Region(Layout layout) : layout_(layout) {}
  Region(int& fd, Layout layout);
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  void drop_descriptor() noexcept;

  int fd_ = -1;  // only to map, unless the kernel needs it to reserve memory and to take it back
  bool advises_ = false;  // whether the kernel does both by address
  std::string path_;
  Layout layout_;
  char* base_ = nullptr;
  pid_t maker_ = 0;  // the process that made it, and takes its name away
  bool owner_ = true;
};

}  // namespace phalanx
