// What g++ compiles may call these two of newer libraries. The library has its own, so that it runs with glibc 2.28 and
// the libstdc++ of GCC 7 (manylinux_2_28).
#include <new>

#ifdef __GLIBCXX__
extern "C" {
char __libc_single_threaded = 0;  // there may be threads, which is never wrong

[[noreturn]] void _ZSt28__throw_bad_array_new_lengthv() {  // std::__throw_bad_array_new_length()
  throw std::bad_array_new_length();
}
}
#endif
