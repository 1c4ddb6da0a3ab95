// Usable prefixes of hybrid families against a slow, obvious reference; also under the sanitizers.
//
// Fails when a window's first chunk is off by one, a group is forgotten, or a run is not restarted by a hole.
#include "check.hpp"
#include "family.hpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>

namespace {

using namespace kvd;

constexpr u64 seed = 20240612;

struct Family {
  u64 low, high;
  u32 split;
};

bool whole(const Family& family, const FamilyRules& rules, std::size_t group) {
  const auto* masks = (family.low | family.high) != 0 ? rules.masks(family.split) : nullptr;
  if (masks == nullptr || masks->empty()) return false;
  return (family.low & (*masks)[group].low) == (*masks)[group].low &&
         (family.high & (*masks)[group].high) == (*masks)[group].high;
}

// The first chunk whose tokens a query at the next position can still see, token by token.
u64 first_seen(const FamilyRules::Group& group, u64 chunks, u64 chunk_tokens) {
  const u64 next = chunks * chunk_tokens;
  if (group.kind == FamilyRules::state) return chunks == 0 ? 0 : chunks - 1;
  for (u64 token = 0; token < next; ++token) {
    const bool seen = group.kind == FamilyRules::full ||
                      (group.kind == FamilyRules::window && next - token < group.window) ||
                      (group.kind == FamilyRules::chunked && token / group.window == next / group.window);
    if (seen) return token / chunk_tokens;
  }
  return chunks;
}

u32 longest(const std::vector<Family>& chain, const FamilyRules& rules, u64 chunk_tokens) {
  for (u64 length = chain.size(); length > 0; --length) {
    bool usable = true;
    for (std::size_t g = 0; g < rules.groups().size() && usable; ++g) {
      for (u64 c = first_seen(rules.groups()[g], length, chunk_tokens); c < length; ++c) {
        usable = usable && whole(chain[c], rules, g);
      }
    }
    if (usable) return static_cast<u32>(length);
  }
  return 0;
}

void test_against_the_reference() {
  std::mt19937_64 random(seed);
  u64 partial = 0;
  for (int round = 0; round < 20'000; ++round) {
    const u64 chunk_tokens = 1 + random() % 8;
    std::vector<FamilyRules::Group> groups;
    for (u64 g = 0, count = 1 + random() % 4; g < count; ++g) {
      const u32 kind = static_cast<u32>(random() % 4);
      const bool windowed = kind == FamilyRules::window || kind == FamilyRules::chunked;
      groups.push_back({kind, windowed ? static_cast<u32>(1 + random() % 40) : 0});
    }
    FamilyRules rules(chunk_tokens, groups);
    for (u32 split = 0; split < 2; ++split) {
      std::vector<FamilyRules::Masks> masks;
      for (std::size_t g = 0; g < groups.size(); ++g) {
        masks.push_back({u64{1 + split} << (2 * g), g % 2 == 0 ? u64{1} << g : 0});
      }
      rules.add(split, masks);
    }
    std::vector<Family> chain(random() % 24);
    const u64 holes = 1 + random() % 20;
    for (Family& family : chain) {
      family = {~u64{0}, ~u64{0}, static_cast<u32>(random() % 2)};
      if (random() % holes == 0) family.low &= ~(u64{3} << (2 * (random() % groups.size())));
      if (random() % (4 * holes) == 0) family = {0, 0, 0};
    }
    PrefixWalk walk(rules);
    for (const Family& family : chain) {
      if (!walk.step(family.low, family.high, family.split)) break;
    }
    const u32 expected = longest(chain, rules, chunk_tokens);
    CHECK(walk.usable() == expected);
    CHECK(walk.unknown_split() == -1);
    partial += expected != 0 && expected != chain.size();
  }
  CHECK(partial > 1000);  // the cases between all and nothing were met
}

void test_an_unknown_split_is_named() {
  const FamilyRules rules(16, {{FamilyRules::full, 0}});
  PrefixWalk walk(rules);
  CHECK(!walk.step(1, 0, 77));
  CHECK(walk.usable() == 0 && walk.unknown_split() == 77);
}

template <class Call>
bool refused(Call&& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void test_refusals() {
  CHECK(refused([] { FamilyRules(0, {{FamilyRules::full, 0}}); }));
  CHECK(refused([] { FamilyRules(16, {}); }));
  CHECK(refused([] { FamilyRules(16, {{FamilyRules::window, 0}}); }));
  CHECK(refused([] { FamilyRules(16, {{FamilyRules::full, 5}}); }));
  CHECK(refused([] { FamilyRules(16, {{9, 0}}); }));
  FamilyRules rules(16, {{FamilyRules::full, 0}});
  CHECK(refused([&] { rules.add(1 << 16, {}); }));
  CHECK(refused([&] { rules.add(1, {{1, 0}, {2, 0}}); }));
}

}  // namespace

int main() {
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  test_against_the_reference();
  test_an_unknown_split_is_named();
  test_refusals();
  std::puts("family: ok");
}
