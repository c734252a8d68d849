// Host tests of the nonce: it stays the same within a process and differs between processes.
#include "nonce.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "checks.hpp"

namespace {

/// The nonce of a new process, which has not drawn one before.
uint64_t nonce_of_a_child() {
  int ends[2];
  uint64_t nonce = 0;
  if (pipe(ends) != 0) {
    return 0;
  }
  pid_t const child = fork();
  if (child == 0) {
    nonce = fp4gemm::workspace_nonce();
    _exit(write(ends[1], &nonce, sizeof nonce) == static_cast<ssize_t>(sizeof nonce) ? 0 : 1);
  }
  close(ends[1]);
  bool const whole = read(ends[0], &nonce, sizeof nonce) == static_cast<ssize_t>(sizeof nonce);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return whole ? nonce : 0;
}

}  // namespace

int main() {
  uint64_t const first = nonce_of_a_child();
  uint64_t const second = nonce_of_a_child();
  CHECK(first != second, "both processes drew %llx", static_cast<unsigned long long>(first));
  for (uint64_t const nonce : {first, second}) {
    CHECK(nonce >> 62 == 1, "the top bits of %llx", static_cast<unsigned long long>(nonce));
  }
  uint64_t of_a_thread = 0;
  std::thread([&] { of_a_thread = fp4gemm::workspace_nonce(); }).join();
  CHECK(of_a_thread == fp4gemm::workspace_nonce(), "it differs between threads");
  return report();
}
