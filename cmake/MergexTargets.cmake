add_library(mergex_defaults INTERFACE)
target_compile_features(mergex_defaults INTERFACE cxx_std_20)
target_include_directories(mergex_defaults INTERFACE ${CMAKE_SOURCE_DIR}/lib)
target_compile_options(mergex_defaults INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor
  # GCC 12 sees overlapping copies in ("text" + string) that are not there (its bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
  $<$<BOOL:${MERGEX_WERROR}>:-Werror>
  $<$<BOOL:${MERGEX_FUZZ}>:-fsanitize-coverage=trace-pc>
  $<$<BOOL:${MERGEX_SANITIZE}>:-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined>)
target_link_options(mergex_defaults INTERFACE $<$<BOOL:${MERGEX_SANITIZE}>:-fsanitize=address,undefined>)

# Sources that need <torch/torch.h> share one precompiled header (it takes 18 s and 700 MB, so it exists once).
function(mergex_use_torch target)
  target_link_libraries(${target} PUBLIC torch::cpu)
  target_compile_options(${target} PRIVATE -fpch-preprocess -Wno-invalid-pch)
  if(NOT TARGET mergex_torch_header)
    file(WRITE ${CMAKE_BINARY_DIR}/torch_header.cpp "")
    add_library(mergex_torch_header STATIC ${CMAKE_BINARY_DIR}/torch_header.cpp)
    target_link_libraries(mergex_torch_header PUBLIC mergex_defaults torch::cpu fmt::fmt)
    target_compile_options(mergex_torch_header PRIVATE -fpch-preprocess -Wno-invalid-pch)
    target_precompile_headers(mergex_torch_header PRIVATE <torch/torch.h> <fmt/format.h>)
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    # The header was compiled with -fPIC; an executable's -fPIE would not fit it.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
  endif()
  target_precompile_headers(${target} REUSE_FROM mergex_torch_header)
endfunction()

# mergex_add_library(name [TORCH] SOURCES a.cpp ... [DEPS target ...])  ->  mergex::name
function(mergex_add_library name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;DEPS" ${ARGN})
  list(TRANSFORM arg_SOURCES PREPEND ${CMAKE_SOURCE_DIR}/lib/${name}/)
  add_library(mergex_${name} STATIC ${arg_SOURCES})
  add_library(mergex::${name} ALIAS mergex_${name})
  target_link_libraries(mergex_${name} PUBLIC mergex_defaults ${arg_DEPS})
  if(arg_TORCH)
    mergex_use_torch(mergex_${name})
  endif()
endfunction()
