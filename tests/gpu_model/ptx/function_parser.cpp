// From text to instructions.
#include "ptx/function_parser.h"

#include <algorithm>
#include <stdexcept>

namespace gpu_model::ptx {
namespace {

const std::map<std::string_view, Type> kTypes = {
    {"pred", Type::pred}, {"b8", Type::u8},   {"b16", Type::u16},       {"b32", Type::u32},    {"b64", Type::u64},
    {"u8", Type::u8},     {"u16", Type::u16}, {"u32", Type::u32},       {"u64", Type::u64},    {"s8", Type::s8},
    {"s16", Type::s16},   {"s32", Type::s32}, {"s64", Type::s64},       {"f32", Type::f32},    {"f64", Type::f64},
    {"bf16", Type::bf16}, {"f16", Type::f16}, {"bf16x2", Type::bf16x2}, {"f16x2", Type::f16x2}};

[[noreturn]] void refuse(const char* what, std::string_view text) {
  throw std::runtime_error(std::string("PTX: ") + what + ": " + std::string(text));
}

Opcode opcode_of(std::string_view text) {
  Opcode opcode;
  while (!text.empty()) {
    const std::string_view part = text.substr(0, text.find('.'));
    const auto type = kTypes.find(part);
    if (type != kTypes.end())
      opcode.types.push_back(type->second);
    else if (part != "uni")  // only a promise
      opcode.name += (opcode.name.empty() ? "" : ".") + std::string(part);
    text.remove_prefix(std::min(part.size() + 1, text.size()));
  }
  return opcode;
}

Flow flow_of(const std::string& name) {
  if (name == "bra") return Flow::branch;
  if (name == "call") return Flow::call;
  if (name == "ret") return Flow::leave;
  if (name == "bar.sync") return Flow::barrier;
  return across_warp({name, {Type::f32, Type::f16, Type::f16, Type::f32}}) ? Flow::together : Flow::next;
}

Space space_of(const std::string& name) {
  for (const auto& [part, space] : {std::pair(".global", Space::global),
                                    {".shared", Space::shared},
                                    {".local", Space::local},
                                    {".param", Space::parameters}})
    if (name.find(part) != name.npos) return space;
  return Space::generic;
}

Execute operation_of(const Opcode& opcode) {
  for (const auto find : {arithmetic, conversion, across_warp, memory_access})
    if (const Execute found = find(opcode)) return found;
  return nullptr;
}

}  // namespace

int bytes_of(Type type) {
  switch (type) {
    case Type::pred:
    case Type::u8:
    case Type::s8:
      return 1;
    case Type::u16:
    case Type::s16:
    case Type::bf16:
    case Type::f16:
      return 2;
    case Type::u64:
    case Type::s64:
    case Type::f64:
      return 8;
    default:
      return 4;
  }
}
bool is_signed(Type type) {
  return type == Type::s8 || type == Type::s16 || type == Type::s32 || type == Type::s64;
}

FunctionParser::FunctionParser(const Module& module, Program& program, std::map<std::string, Function>& done)
    : module_(module), program_(program), done_(done), places_(module.sources()) {}

Function FunctionParser::parse(const std::string& name) {
  done_[name].entry = -1;  // so that a function that calls itself is noticed
  const std::string_view text = module_.function(name);
  const bool entry = text.substr(0, text.find('\n')).find(".entry") != text.npos;
  parse_body(text.substr(parse_head(text, entry)));
  function_.entry = int(program_.code.size());
  for (size_t n = 0; n < code_.size(); ++n) {
    if (jumps_[n].empty()) continue;
    if (!labels_.count(jumps_[n])) refuse("no such label", code_[n].text);
    code_[n].target = function_.entry + labels_[jumps_[n]];
  }
  program_.code.insert(program_.code.end(), code_.begin(), code_.end());
  return done_[name] = function_;
}

// Parameters and results; returns where the body begins.
size_t FunctionParser::parse_head(std::string_view text, bool entry) {
  const size_t body = text.find("\n{");
  const std::string_view head = text.substr(0, body);
  if (const size_t most = head.find(".maxntid"); most != head.npos)
    program_.most_threads = std::stoi(std::string(head.substr(most + 8)));
  size_t open = head.find('(');
  if (!entry && trimmed(head.substr(5)).front() == '(') {
    declare_parameter(head.substr(open + 1, head.find(')') - open - 1), false, function_.results);
    open = head.find('(', open + 1);
  }
  for (const std::string& one : split(head.substr(open + 1, head.rfind(')') - open - 1)))
    if (!one.empty()) declare_parameter(one, entry, function_.parameters);
  if (entry) program_.parameters = function_.parameters;
  return body + 2;
}

// .param .align 8 .b8 name[2160]  or  .param .u64 name
void FunctionParser::declare_parameter(std::string_view declaration, bool entry, std::vector<Transfer>& list) {
  const std::string_view last = trimmed(declaration.substr(declaration.find_last_of(" \t") + 1));
  const size_t bracket = last.find('[');
  int bytes = 0, align = 0;
  if (bracket != last.npos) {
    bytes = std::stoi(std::string(last.substr(bracket + 1)));
    align = std::stoi(std::string(declaration.substr(declaration.find(".align") + 6)));
  } else {
    const std::string_view type = trimmed(declaration.substr(0, declaration.find_last_of(" \t")));
    align = bytes = bytes_of(kTypes.at(type.substr(type.rfind('.') + 1)));
  }
  int offset = entry && !list.empty() ? list.back().to + list.back().bytes : 0;
  offset = entry ? (offset + align - 1) / align * align : allocate(bytes);
  symbols_[std::string(last.substr(0, bracket))] = {entry ? Space::parameters : Space::local, offset, bytes,
                                                    !entry && &list == &function_.parameters};
  list.push_back({offset, offset, bytes});
}

int FunctionParser::allocate(int bytes) {
  const int offset = program_.frame_bytes;
  program_.frame_bytes += (bytes + 15) / 16 * 16;
  return offset;
}

void FunctionParser::parse_body(std::string_view text) {
  depth_ = 1;
  for (size_t begins = 0; depth_ > 0 && begins < text.size();) {
    const size_t ends = std::min(text.find('\n', begins), text.size());
    std::string_view line = text.substr(begins, ends - begins);
    line = trimmed(line.substr(0, line.find("//")));
    if (!line.empty() && !directive(line)) characters(line);
    begins = ends + 1;
  }
}

// Lines that are no statements: places, advice, labels.
bool FunctionParser::directive(std::string_view line) {
  if (line.starts_with(".loc\t") || line.starts_with(".loc ")) {
    places_.read(line);
  } else if (line.front() == '$' && line.back() == ':') {
    labels_[std::string(line.substr(0, line.size() - 1))] = int(code_.size());
  } else if (!line.starts_with(".pragma")) {
    return false;
  }
  return true;
}

void FunctionParser::characters(std::string_view line) {
  for (const char c : line) {
    const bool between = trimmed(pending_).empty();
    if (c == ';') {
      statement(trimmed(pending_));
      pending_.clear();
    } else if (c == '{' && between) {
      ++depth_, scopes_.emplace_back();
    } else if (c == '}' && between) {
      if (--depth_ == 0) return;
      scopes_.pop_back();
    } else {
      pending_ += c;
    }
  }
  pending_ += ' ';
}

void FunctionParser::statement(std::string_view text) {
  if (text.empty()) return;
  if (text.front() == '.') return declaration(text);
  Instruction in = instruction(text);
  code_.push_back(std::move(in));
  jumps_.resize(code_.size());
  if (code_.back().flow == Flow::branch) jumps_.back() = trimmed(text.substr(text.rfind('$')));
}

// Registers of inner braces, locals, and what calls pass.
void FunctionParser::declaration(std::string_view text) {
  const std::string_view kind = text.substr(0, text.find_first_of(" \t"));
  const std::string_view names = trimmed(text.substr(text.find_last_of(" \t", text.find(',')) + 1));
  if (kind == ".reg") {
    if (scopes_.empty()) return;  // those of the function are made when they are named
    for (const std::string& name : split(names)) scopes_.back()[name] = program_.new_register(name);
  } else if (kind == ".param") {
    std::vector<Transfer> unused;
    declare_parameter(text, false, unused);
  } else if (kind == ".local") {
    const size_t bracket = names.find('[');
    const int bytes = std::stoi(std::string(names.substr(bracket + 1)));
    symbols_[std::string(names.substr(0, bracket))] = {Space::local, allocate(bytes), bytes, false};
  } else {
    refuse("unknown declaration", text);
  }
}

Instruction FunctionParser::instruction(std::string_view text) {
  Instruction in;
  in.text = text, in.line = places_.now();
  if (text.front() == '@') {
    in.negated = text[1] == '!';
    const size_t ends = text.find_first_of(" \t");
    in.guard = register_of(std::string(text.substr(1 + in.negated, ends - 1 - in.negated)));
    text = trimmed(text.substr(ends));
  }
  const size_t ends = std::min(text.find_first_of(" \t"), text.size());
  const Opcode opcode = opcode_of(text.substr(0, ends));
  in.flow = flow_of(opcode.name);
  if (in.flow == Flow::together && in.guard >= 0) refuse("a part of a warp alone", in.text);
  const std::vector<std::string> texts = split(trimmed(text.substr(ends)));
  if (in.flow == Flow::barrier && texts != std::vector<std::string>{"0"}) refuse("another barrier", in.text);
  if (in.flow == Flow::call)
    call(in, texts);
  else if (in.flow == Flow::next || in.flow == Flow::together)
    operands(in, opcode, texts);
  return in;
}

void FunctionParser::operands(Instruction& in, const Opcode& opcode, const std::vector<std::string>& texts) {
  in.run = operation_of(opcode);
  if (!in.run) refuse("unknown instruction", in.text);
  in.space = space_of(opcode.name);
  if (!opcode.types.empty()) in.bytes = bytes_of(opcode.types[0]), in.extends_sign = is_signed(opcode.types[0]);
  const bool no_result =
      opcode.name.starts_with("st") || opcode.name.starts_with("cp.") || opcode.name == "bar.warp.sync";
  int addresses = 0;
  for (size_t n = 0; n < texts.size(); ++n)
    if (!texts[n].empty()) take(n == 0 && !no_result ? in.to : in.from, in, texts[n], addresses);
  carry(in, opcode);
}

// The carry is a register like others, behind the rest.
void FunctionParser::carry(Instruction& in, const Opcode& opcode) {
  const std::string& name = opcode.name;
  const bool takes = name.starts_with("addc") || name.starts_with("subc") || name.starts_with("madc");
  const bool leaves = name.ends_with(".cc");
  if (!takes && !leaves) return;
  if (carry_ < 0) carry_ = program_.new_register("carry");
  if (takes) in.from.push_back(carry_);
  if (leaves) in.to.push_back(carry_);
}

void FunctionParser::call(Instruction& in, const std::vector<std::string>& texts) {
  const bool gives = texts.front().front() == '(';
  const std::string& name = texts.at(gives);
  if (!module_.has(name)) refuse("no such function", name);
  if (!done_.count(name)) FunctionParser(module_, program_, done_).parse(name);
  const Function& callee = done_.at(name);
  if (callee.entry < 0) refuse("a function that calls itself", name);
  in.target = callee.entry;
  if (gives) in.results = transfers(texts[0], callee.results, false);
  if (texts.size() > size_t(gives) + 1) in.arguments = transfers(texts[gives + 1], callee.parameters, true);
}

std::vector<Transfer> FunctionParser::transfers(const std::string& names, const std::vector<Transfer>& formals,
                                                bool inwards) {
  std::vector<Transfer> list;
  for (const std::string& name : split(std::string_view(names).substr(1, names.size() - 2))) {
    if (name.empty()) continue;
    const Symbol& symbol = symbols_.at(name);
    const Transfer& formal = formals.at(list.size());
    if (symbol.bytes != formal.bytes) refuse("an argument of another size", name);
    list.push_back(inwards ? Transfer{symbol.offset, formal.from, formal.bytes}
                           : Transfer{formal.from, symbol.offset, formal.bytes});
  }
  if (list.size() != formals.size()) refuse("another number of arguments", names);
  return list;
}

// An operand's registers: one, several in braces, a pair with |, or those of an address.
void FunctionParser::take(std::vector<int>& registers, Instruction& in, const std::string& text, int& addresses) {
  if (text.front() == '[') {
    in.from.push_back(address(in, std::string_view(text).substr(1, text.size() - 2), addresses));
    ++addresses;
  } else if (text.front() == '{') {
    for (const std::string& one : split(std::string_view(text).substr(1, text.size() - 2)))
      registers.push_back(operand(one));
  } else if (const size_t bar = text.find('|'); bar != text.npos) {
    registers.push_back(operand(text.substr(0, bar)));
    registers.push_back(operand(text.substr(bar + 1)));
  } else {
    registers.push_back(operand(text));
  }
}

int FunctionParser::address(Instruction& in, std::string_view text, int which) {
  const size_t plus = text.find('+');
  const std::string base(trimmed(text.substr(0, plus)));
  if (plus != text.npos) in.offset[which] = std::stoll(std::string(text.substr(plus + 1)));
  const auto symbol = symbols_.find(base);
  if (symbol == symbols_.end()) return operand(base);
  in.space = symbol->second.space;
  return constant(uint64_t(symbol->second.offset));
}

// A register, a number, or a name that stands for an address in its space.
int FunctionParser::operand(std::string_view text) {
  text = trimmed(text);
  const std::string name(text);
  if (name.starts_with("0f") || name.starts_with("0d")) return constant(std::stoull(name.substr(2), nullptr, 16));
  if (std::isdigit(name[0])) return constant(std::stoull(name, nullptr, 0));
  if (name[0] == '-') return constant(uint64_t(std::stoll(name, nullptr, 0)));
  if (const auto symbol = symbols_.find(name); symbol != symbols_.end()) {
    if (symbol->second.formal) refuse("the address of a function's parameter", text);
    return constant(uint64_t(symbol->second.offset));
  }
  if (const auto table = module_.tables().find(name); table != module_.tables().end())
    return constant(reinterpret_cast<uint64_t>(table->second.data()));
  if (name.ends_with("shared_memoryE")) return constant(0);
  if (name[0] != '%' && (scopes_.empty() || !scopes_.back().count(name))) refuse("unknown operand", text);
  return register_of(name);
}

int FunctionParser::register_of(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
    if (const auto found = scope->find(name); found != scope->end()) return found->second;
  if (name.starts_with("%tid") || name.starts_with("%ctaid") || name.starts_with("%nctaid")) {
    const auto [found, fresh] = program_.of_thread.try_emplace(name, program_.registers);
    if (fresh) program_.new_register(name);
    return found->second;
  }
  const auto [found, fresh] = registers_.try_emplace(name, program_.registers);
  if (fresh) program_.new_register(name);
  return found->second;
}

int FunctionParser::constant(uint64_t value) {
  const auto [found, fresh] = program_.constants.try_emplace(value, program_.registers);
  if (fresh) program_.new_register("a constant");
  return found->second;
}

}  // namespace gpu_model::ptx
