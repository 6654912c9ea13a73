#include <trireme/common/error.h>
#include <trireme/common/version.h>

#include <iostream>

int main() {
  const std::string text = trireme::error_text("consumer", "got a group", {0, 1}, "Go on.");
  std::cout << "trireme " << trireme::kVersion << ": " << text << "\n";
  return text == "[consumer] got a group (rank 0 of 1). Go on." ? 0 : 1;
}
