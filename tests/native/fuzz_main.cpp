// A driver for the fuzz targets where libFuzzer is not at hand: replays files, then tries random inputs made from them.
//
//   fuzz_x SECONDS SEED FILE...
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size);

namespace {

using Input = std::vector<unsigned char>;

Input mutated(Input input, std::mt19937_64& random) {
  static const unsigned long long numbers[] = {0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1ull << 63, ~0ull};
  for (int changes = 1 << random() % 5; changes > 0; --changes) {
    const size_t at = input.empty() ? 0 : random() % input.size();
    if (random() % 4 == 0 || input.size() < 14) {  // another edit: u32 offset, u8 width, u64 value
      const bool header = random() % 2 == 0;
      const unsigned offset = static_cast<unsigned>(header ? random() % 700 : random());
      const unsigned long long value = random() % 2 == 0 ? random() : numbers[random() % 8];
      for (int i = 0; i < 4; ++i) input.push_back(static_cast<unsigned char>(offset >> 8 * i));
      input.push_back(static_cast<unsigned char>(random()));
      for (int i = 0; i < 8; ++i) input.push_back(static_cast<unsigned char>(value >> 8 * i));
    } else if (random() % 8 == 0) {
      input.erase(input.begin() + static_cast<long>(at));
    } else {
      input[at] = static_cast<unsigned char>(random() % 2 == 0 ? random() : input[at] ^ (1u << random() % 8));
    }
  }
  if (input.size() > 4096) input.resize(4096);
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return std::fprintf(stderr, "usage: %s SECONDS SEED FILE...\n", arguments[0]), 2;
  std::vector<Input> known{Input{1}};
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    known.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(known.back().data(), known.back().size());
  }
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(arguments[1]));
  unsigned long runs = known.size();
  while (std::chrono::steady_clock::now() < end) {
    const Input input = mutated(known[random() % known.size()], random);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
  }
  std::printf("%zu inputs known, %lu run, seed %s\n", known.size(), runs, arguments[2]);
}
