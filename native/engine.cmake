# The engine as a library, for the Python module and the native tests.

set(native ${CMAKE_CURRENT_LIST_DIR})
add_library(phalanx_engine STATIC
  ${native}/collectives.cpp
  ${native}/copy.cpp
  ${native}/driver.cpp
  ${native}/engine.cpp
  ${native}/membership.cpp
  ${native}/reduce.cpp
  ${native}/reduce_avx2.cpp
  ${native}/reduce_avx512.cpp
  ${native}/reduce_baseline.cpp
  ${native}/region.cpp
  ${native}/rejoin.cpp
  ${native}/sync.cpp
  ${native}/transfers.cpp)
target_include_directories(phalanx_engine PUBLIC ${native})
target_compile_features(phalanx_engine PUBLIC cxx_std_20)
target_compile_options(phalanx_engine PRIVATE
  -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
  # The same bits on every instruction set: no fused or reordered operations.
  -ffp-contract=off)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  # One file per instruction set; one is chosen at run time.
  set_source_files_properties(${native}/reduce_avx2.cpp
    PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
  set_source_files_properties(${native}/reduce_avx512.cpp
    PROPERTIES COMPILE_OPTIONS "-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl")
endif()
