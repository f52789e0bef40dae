// The shared memory of a group: created by one rank, mapped by all, unlinked before it is used.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "region_layout.hpp"

namespace phalanx {

class Region {
 public:
  // `where` is "memfd", or a directory for a file with an unguessable name.
  static Region create(const std::string& where, int ranks, const Sizes& sizes);

  // Maps a region that another rank created. Throws unless this user owns it and the token matches.
  static Region open(const std::string& path, std::uint64_t token, int ranks, const Sizes& sizes);

  // A second view of the same mapping, which must outlive it. For tests with threads as ranks: at one
  // address ThreadSanitizer sees the accesses of all ranks.
  Region alias() const;

  Region(Region&& other) noexcept;
  Region& operator=(Region&&) = delete;
  ~Region();

  const Layout& layout() const { return layout_; }
  const std::string& path() const { return path_; }  // for `open`; empty once unlinked
  std::uint64_t token() const { return header().token; }

  // Removes the name and closes the descriptor; existing mappings stay.
  void unlink();

  Header& header() const { return *at<Header>(0); }
  Control& control(int rank) const {
    return *at<Control>(layout_.control + static_cast<std::size_t>(rank) * sizeof(Control));
  }
  char* bytes(std::size_t offset) const { return base_ + offset; }

  // Returns the offset of memory in a slab, or kNever.
  std::uint64_t offset_of(const void* address, std::size_t length) const;

  // Allocates the pages of a part of a slab, so that touching them cannot fail later; frees them.
  void reserve(std::size_t offset, std::size_t length);
  void release(std::size_t offset, std::size_t length) noexcept;

 private:
  explicit Region(Layout layout) : layout_(layout) {}
  Region(int& fd, Layout layout);
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  void close_descriptor() noexcept;

  int fd_ = -1;  // closed after mapping if `can_populate_`
  bool can_populate_ = false;  // the kernel reserves and releases pages by address
  std::string path_;
  Layout layout_;
  char* base_ = nullptr;
  pid_t creator_pid_ = 0;  // of the process that unlinks it
  bool owner_ = true;
};

}  // namespace phalanx
